"""Containers of a compose project, seen and changed through the API of a Docker engine (25 or later)."""

from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from moesaic.errors import DeadlineExceeded, NotReady
from moesaic.services.scheduler.scaling.actuators.http_api import HttpAnswer, HttpApi

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
ONE_OFF = "com.docker.compose.oneoff"
LEAVING = "-leaving"  # ends the name of a container that was told to stop
_VERSION = "/v1.44"  # of engine 25; later ones speak it too
_HEARD_S = 2.0  # wait for an answer to a stop, which goes on without us
_OF_A_COPY = ("Aliases", "DriverOpts", "GwPriority", "Links")  # what networks keep


class Container(msgspec.Struct, frozen=True):
    """One container of a service.

    Attributes:
        id: the engine's id.
        name: the engine's name, without a slash.
        number: number within its service, as compose counts.
        state: in the engine's words, such as running, created or exited.
        status: the same for people, with its health if that is checked.
    """

    id: str
    name: str
    number: int
    state: str
    status: str = ""

    @property
    def leaving(self) -> bool:
        """True once it was told to stop, which the engine then knows by its name."""
        return self.name.endswith(LEAVING)

    @property
    def runs(self) -> bool:
        """True while its process runs, or is started again by the engine."""
        return self.state in ("running", "restarting", "paused")

    @property
    def works(self) -> bool:
        """True while its process runs, and passes its health check if it has one."""
        return self.state == "running" and "(unhealthy)" not in self.status


class ContainerEngine:
    """The engine, limited to the containers of one compose project.

    Every method raises ``NotReady`` where the engine cannot be reached or refuses, and ``DeadlineExceeded`` where
    it does not answer.
    """

    def __init__(self, api: HttpApi, project: str) -> None:
        self._api, self._project = api, project

    async def containers(self, service: str) -> list[Container]:
        """List those of a service, in any state, by their numbers."""
        labels = [f"{PROJECT}={self._project}", f"{SERVICE}={service}", f"{ONE_OFF}=False"]
        filters = msgspec.json.encode({"label": labels}).decode()
        query = urlencode({"all": "1", "filters": filters})
        answer = await self._call("GET", f"/containers/json?{query}")
        found = [
            Container(
                raw["Id"],
                raw["Names"][0].lstrip("/"),
                int(raw["Labels"][NUMBER]),
                raw["State"],
                raw.get("Status") or "",
            )
            for raw in answer.body
            if raw["Names"] and raw["Labels"].get(NUMBER, "").isdecimal()
        ]
        return sorted(found, key=lambda container: (container.number, container.id))

    async def copy(self, container: Container, service: str, number: int) -> None:
        """Create another container like this one and start it, unless there is one of that number."""
        raw = (await self._call("GET", f"/containers/{container.id}/json")).body
        name = f"{self._project}-{service}-{number}"
        body = config_of_copy(raw, number, name)
        query = urlencode({"name": name})
        answer = await self._call("POST", f"/containers/create?{query}", body, accepted=(409,))
        # Else another scheduler made it, and starts it.
        if answer.status != 409:
            await self._start(answer.body["Id"])

    async def start(self, container: Container) -> None:
        """Start a container that does not run, under the name it had before it was told to stop."""
        name = container.name.removesuffix(LEAVING)
        if name == container.name or await self._rename(container, name):
            await self._start(container.id)

    async def stop(self, container: Container) -> bool:
        """Tell a container to stop, once; its own ``stop_grace_period`` says after how long the engine ends it.

        A second signal would end a worker at once, with requests in flight. So the container is renamed
        first, which succeeds for one caller only and is seen by all later ones.

        Returns:
            False if another caller has told it.
        """
        if not await self._rename(container, container.name + LEAVING):
            return False
        await self.stop_again(container)
        return True

    async def stop_again(self, container: Container) -> None:
        """Tell a container to stop, even if another caller did; returns before it has."""
        path = f"/containers/{container.id}/stop"
        # The engine goes on by itself when a caller has hung up.
        with suppress(DeadlineExceeded):
            await self._call("POST", path, accepted=(304, 404), timeout_s=_HEARD_S)

    async def stop_timeout_s(self, container: Container) -> float:
        """Ask after how many seconds the engine ends a container that does not stop."""
        raw = (await self._call("GET", f"/containers/{container.id}/json", accepted=(404,))).body
        given = (raw.get("Config") or {}).get("StopTimeout")
        return 10.0 if given is None else float(given)

    async def remove(self, container: Container) -> None:
        """Remove a container that does not run, with its anonymous volumes; one that does stays."""
        await self._call("DELETE", f"/containers/{container.id}?v=1", accepted=(404, 409))

    async def _start(self, container_id: str) -> None:
        await self._call("POST", f"/containers/{container_id}/start", accepted=(304, 404))

    async def _rename(self, container: Container, name: str) -> bool:
        path = f"/containers/{container.id}/rename?name={quote(name)}"
        answer = await self._call("POST", path, accepted=(400, 404, 409))
        # Else it has that name, or is gone.
        return answer.status == 204

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        accepted: tuple[int, ...] = (),
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        answer = await self._api.call(method, _VERSION + path, body, timeout_s=timeout_s)
        if answer.status >= 300 and answer.status not in accepted:
            raise NotReady(f"{self._api.what} at {self._api.url} refuses: {answer.message}")
        return answer


def config_of_copy(raw: dict[str, Any], number: int, name: str) -> dict[str, Any]:
    """Turn what the engine tells about a container into the order for another one of its service.

    Its host name, addresses and places on networks are its own, and so is what is left out here.
    """
    config = {key: value for key, value in raw["Config"].items() if key != "MacAddress"}
    own = {raw["Id"][:12], raw["Name"].strip("/").removesuffix(LEAVING)}
    if config.get("Hostname") in own:
        del config["Hostname"]
    config["Labels"] = {**config["Labels"], NUMBER: str(number)}
    host = raw["HostConfig"]
    order = {**config, "HostConfig": host}
    if host.get("NetworkMode", "").partition(":")[0] in ("host", "none", "container"):
        return order
    networks: dict[str, Any] = {}
    for network, endpoint in raw["NetworkSettings"]["Networks"].items():
        kept = {key: endpoint[key] for key in _OF_A_COPY if endpoint.get(key)}
        aliases = [alias for alias in kept.get("Aliases", ()) if alias not in own]
        networks[network] = {**kept, "Aliases": [*aliases, name]}
    order["NetworkingConfig"] = {"EndpointsConfig": networks}
    return order
