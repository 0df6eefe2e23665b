"""Each image is a service on its own: nothing of the others in it, and it says what it lacks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from moesaic.cluster.security.credentials import Credentials
from moesaic.v1 import admin_pb2, admin_pb2_grpc
from tests.calls import Proof
from tests.compose.containers import docker
from tests.deploy.images import importable
from tests.suites import ROOT
from tests.waiting import eventually

# Of one call, tried again as long as the container runs.
CALL_S = 5.0
SECRET = "the cluster secret"
SERVICES = ("gateway", "scheduler", "attention", "expert")
FOREIGN_PACKAGES = {
    "gateway": ("torch", "ucxx", "safetensors", "triton"),
    "scheduler": ("torch", "ucxx", "safetensors", "triton", "fastapi", "uvicorn", "tokenizers"),
    "attention": ("fastapi", "uvicorn", "tokenizers"),
    "expert": ("fastapi", "uvicorn", "tokenizers"),
}


def image(service: str) -> str:
    return f"moesaic-{service}:test"


@contextmanager
def alone(service: str) -> Iterator[tuple[str, str]]:
    """A container of one image, with nobody to talk to, and the address of its admin port."""
    settings = {
        "MOESAIC_HOST": "0.0.0.0",
        "MOESAIC_ADVERTISE_HOST": "127.0.0.1",
        "MOESAIC_ADMIN_PORT": "7000",
        "MOESAIC_MODEL": "/model",
        "MOESAIC_NO_AUTH": "true",
        "MOESAIC_SECRET": SECRET,
    }
    if service == "scheduler":
        del settings["MOESAIC_MODEL"], settings["MOESAIC_NO_AUTH"]
    flags = [part for name, value in settings.items() for part in ("-e", f"{name}={value}")]
    volume = ("-v", f"{ROOT}/models/demo:/model:ro", "--read-only", "--tmpfs", "/tmp")
    container = docker(
        "run", "-d", "--init", "-p", "127.0.0.1::7000", *volume, *flags, image(service)
    ).strip()
    try:
        yield container, docker("port", container, "7000").strip()
    finally:
        docker("rm", "-f", container)


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_explains_its_settings(service: str) -> None:
    shown = docker("run", "--rm", "--network", "none", image(service), "--help")
    assert "--redis-url" in shown
    assert "--control-host" in shown


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_answers_its_operator_without_the_others_and_says_what_it_waits_for(
    service: str,
) -> None:
    with alone(service) as (container, address), grpc.insecure_channel(address) as plain:
        channel = grpc.intercept_channel(plain, Proof(Credentials(SECRET.encode())))
        stub = admin_pb2_grpc.AdminServiceStub(channel)

        def waits() -> Any:
            running = docker("inspect", "-f", "{{.State.Running}}", container).strip()
            assert running == "true", docker("logs", "--tail", "20", container, check=False)
            request = admin_pb2.GetInfoRequest()
            try:
                info = stub.GetInfo(request, timeout=CALL_S, wait_for_ready=True)
            except grpc.RpcError:
                return None
            return info if any("redis" in reason for reason in info.waiting_for) else None

        info = eventually(waits)
        assert info.service == service
        assert info.state == admin_pb2.SERVICE_STATE_STARTING


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_has_neither_code_nor_packages_of_the_others(service: str) -> None:
    foreign = [f"moesaic.services.{other}" for other in SERVICES if other != service]
    foreign += FOREIGN_PACKAGES[service]
    script = (
        "import importlib.util, sys\n"
        "def there(name):\n"
        "    try: return importlib.util.find_spec(name) is not None\n"
        "    except ModuleNotFoundError: return False\n"
        "print([name for name in sys.argv[1:] if there(name)])"
    )
    run = ("run", "--rm", "--network", "none", "--entrypoint", "python", image(service))
    assert docker(*run, "-c", script, *foreign) == "[]\n"
    assert (
        docker(*run, "-c", script, f"moesaic.services.{service}")
        == f"['moesaic.services.{service}']\n"
    )


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_imports_all_that_its_service_can(service: str) -> None:
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    run = ("run", "--rm", "--network", "none", "--entrypoint", "python", image(service))
    docker(*run, "-c", script, *importable(service))


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_as_nobody_in_particular(service: str) -> None:
    run = ("run", "--rm", "--network", "none", "--entrypoint", "id", image(service))
    assert docker(*run, "-u") == "10001\n"
