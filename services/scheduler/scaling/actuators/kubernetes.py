"""Workers as pods of two Deployments, whose numbers of replicas are set at the API server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from moesaic.errors import InvalidInput, NotReady
from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.http_api import HttpAnswer, HttpApi

log = structlog.get_logger()

API_URL = "https://kubernetes.default.svc"
DEPLOYMENTS: Mapping[str, str] = {"attention": "attention", "experts": "expert"}
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where pods find theirs
_MOST_TRIES = 4  # when others change the same object at the same moment


class KubernetesActuator:
    """Sets the replicas of one Deployment for each side, in its own namespace; Kubernetes brings pods, and ends them.

    A pod that is taken away gets SIGTERM, drains, and is ended only after ``terminationGracePeriodSeconds``.

    Args:
        most: the largest shape that the cluster carries.
        api_url: of the API server.
        token_file: with a token that is read for each call, because Kubernetes replaces it.
        ca_file: authority of the API server's certificate.

    Raises:
        InvalidInput: ``api_url`` has a wrong form.
    """

    name = "kubernetes"

    def __init__(
        self,
        *,
        most: FleetShape,
        api_url: str = API_URL,
        token_file: Path = SERVICE_ACCOUNT / "token",
        ca_file: Path = SERVICE_ACCOUNT / "ca.crt",
    ) -> None:
        self._api = HttpApi("the API server", api_url, setting="api_url", ca_file=str(ca_file))
        self._most, self._token_file = most, token_file

    async def most(self) -> FleetShape:
        """Return the shape that operators gave, once both Deployments have been found.

        Raises:
            InvalidInput: a Deployment is not there, or is not ours to scale; names the setting.
            NotReady: the API server cannot be reached, or does not know us.
        """
        for side, deployment in DEPLOYMENTS.items():
            await self._scale_of(side, deployment)
        return self._most

    async def intended(self) -> FleetShape:
        """Return the replicas that both Deployments shall have.

        Raises:
            InvalidInput: a Deployment is not there, or is not ours to scale; names the setting.
            NotReady: the API server cannot be reached, or does not know us.
        """
        found = {
            side: _replicas(await self._scale_of(side, deployment))
            for side, deployment in DEPLOYMENTS.items()
        }
        return FleetShape(**found)

    async def apply(self, wanted: FleetShape) -> None:
        """Tell the API server the numbers of ``wanted`` that it does not know yet.

        Raises:
            InvalidInput: a Deployment is not there, or is not ours to scale; names the setting.
            NotReady: the API server cannot be reached, refuses, or does not know us.
        """
        for side, deployment in DEPLOYMENTS.items():
            await self._bring(side, deployment, getattr(wanted, side))

    async def _bring(self, side: str, deployment: str, num_wanted: int) -> None:
        for _ in range(_MOST_TRIES):
            scale = await self._scale_of(side, deployment)
            before = _replicas(scale)
            if before == num_wanted:
                return
            # With the version that was read, nobody's newer number is overwritten unseen.
            version = scale["metadata"]["resourceVersion"]
            patch = {
                "metadata": {"resourceVersion": version},
                "spec": {"replicas": num_wanted},
            }
            answer = await self._call("PATCH", deployment, patch)
            if answer.status != 409:
                self._require(answer, side, deployment, "patch")
                log.info(
                    "deployment.scaled", deployment=deployment, before=before, replicas=num_wanted
                )
                return
        raise NotReady(
            f"the API server: Deployment {deployment!r} was changed by others {_MOST_TRIES} times "
            f"while its replicas were set to {num_wanted}"
        )

    async def _scale_of(self, side: str, deployment: str) -> dict[str, Any]:
        answer = await self._call("GET", deployment)
        self._require(answer, side, deployment, "get")
        return dict(answer.body)

    async def _call(self, method: str, deployment: str, patch: Any = None) -> HttpAnswer:
        path = f"/apis/apps/v1/namespaces/{self._namespace()}/deployments/{deployment}/scale"
        headers = {
            "Authorization": f"Bearer {_read(self._token_file)}",
            "Accept": "application/json",
            "Content-Type": "application/merge-patch+json",
        }
        return await self._api.call(method, path, patch, headers=headers)

    def _namespace(self) -> str:
        return _read(self._token_file.parent / "namespace")

    def _require(self, answer: HttpAnswer, side: str, deployment: str, verb: str) -> None:
        """Raise the error that names what to mend, unless the call has succeeded."""
        where = f"Deployment {deployment!r} in namespace {self._namespace()!r}"
        if answer.status == 401:
            raise NotReady(
                f"the API server does not accept the token in {self._token_file}: the service "
                f"account may have been deleted; start this pod again ({answer.message})"
            )
        if answer.status == 403:
            raise InvalidInput(
                "scaling_actuator",
                f"the service account may not {verb} the scale of {where}: bind a Role with get "
                f"and patch on deployments/scale to it ({answer.message})",
            )
        if answer.status == 404:
            raise InvalidInput(
                "scaling_actuator",
                f"{where} not found: create it for the workers of this side ({answer.message})",
            )
        if answer.status != 200:
            raise NotReady(
                f"the API server refuses to {verb} the scale of {where}: {answer.message}"
            )


def _replicas(scale: Mapping[str, Any]) -> int:
    # 0 is left out.
    return int(scale.get("spec", {}).get("replicas", 0))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise NotReady(
            f"{file} cannot be read: this must run in a pod with a service account and "
            "automountServiceAccountToken"
        ) from error
