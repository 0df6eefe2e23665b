import asyncio
import os
import subprocess
import sys

import pytest

from moesaic.cluster.rpc.server import AdminServer, admin_server
from moesaic.settings import ServiceSettings

PROBE = [sys.executable, "-m", "moesaic.cluster.rpc.health_probe"]


@pytest.fixture
async def admin():
    async with admin_server(ServiceSettings(), "expert", worker_id="e-1") as server:
        yield server


def port_of(admin: AdminServer) -> str:
    return admin.address.rsplit(":", 1)[1]


async def probe(*arguments: str, **variables: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOESAIC_")}
    done = await asyncio.to_thread(
        subprocess.run,
        [*PROBE, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "hosts",
    [
        {},
        {"MOESAIC_HOST": "0.0.0.0"},
        {"MOESAIC_HOST": "localhost", "MOESAIC_CONTROL_HOST": ""},
        {"MOESAIC_HOST": "198.51.100.1", "MOESAIC_CONTROL_HOST": "127.0.0.1"},
    ],
)
async def test_it_asks_where_the_variables_say_that_the_service_listens(admin, hosts):
    admin.status.set_state("ready")

    assert await probe(MOESAIC_ADMIN_PORT=port_of(admin), **hosts) == (0, "")


async def test_it_asks_where_it_is_told(admin):
    admin.status.set_state("ready")

    assert await probe(admin.address, MOESAIC_ADMIN_PORT="1") == (0, "")


async def test_a_service_that_does_not_serve_yet_is_not_well(admin):
    status, said = await probe(admin.address)

    assert status == 1
    assert said == f"not serving: {admin.address}: it answers NOT_SERVING\n"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "MOESAIC_ADMIN_PORT must be"),
        ({"MOESAIC_ADMIN_PORT": "http"}, "MOESAIC_ADMIN_PORT must be"),
        ({"MOESAIC_ADMIN_PORT": "1"}, "127.0.0.1:1: UNAVAILABLE"),
        ({"MOESAIC_ADMIN_PORT": "1", "MOESAIC_HOST": "nobody.invalid"}, "name nobody.invalid"),
    ],
)
async def test_what_cannot_be_asked_is_not_well_and_it_says_why(variables, why):
    status, said = await probe(**variables)

    assert status == 1
    assert said.startswith("not serving: ")
    assert why in said
    assert len(said.splitlines()) == 1


def test_it_imports_little_for_it_is_started_often():
    code = "import sys, moesaic.cluster.rpc.health_probe; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"pydantic", "structlog", "redis", "msgspec", "numpy", "torch"} & set(loaded)
