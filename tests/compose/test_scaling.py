"""The scheduler's actuator of compose on a real engine: workers come and go under load."""

import os

import httpx

from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.compose import ComposeActuator
from tests.compose.containers import Containers, docker, logs
from tests.compose.load import Answers, Load
from tests.suites import eventually

SOCKET = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def actuator_of(containers: Containers) -> ComposeActuator:
    """An actuator of its own, as each scheduler has one."""
    return ComposeActuator(SOCKET, containers.project, most=FleetShape(1, 3))


async def test_workers_that_the_actuator_adds_and_stops_cost_no_request(
    containers: Containers, client: httpx.Client, expected: Answers
) -> None:
    before = {name: docker("inspect", "-f", "{{.Id}}", name) for name in _all(containers)}
    new = f"{containers.project}-expert-3"
    with Load(client, expected) as load:
        await actuator_of(containers).apply(FleetShape(1, 3))
        await actuator_of(containers).apply(FleetShape(1, 3))
        containers.until_placed(3)
        assert set(_all(containers)) == {*before, new}
        assert _networks(new) == _networks(f"{containers.project}-expert-2")
        load.until_right(20)

        await actuator_of(containers).apply(FleetShape(1, 2))
        await actuator_of(containers).apply(FleetShape(1, 2))
        leaving = f"{new}-leaving"
        eventually(lambda: _state(leaving) == "exited 0", 90)
        assert logs(leaving).count('"service.stopping"') == 1
        load.until_right(20)

        await actuator_of(containers).apply(FleetShape(1, 2))
        containers.until_placed(2)
    assert (load.errors, load.wrong) == ({}, [])
    assert {n: docker("inspect", "-f", "{{.Id}}", n) for n in _all(containers)} == before


async def test_what_the_actuator_added_is_compose_s_own(
    containers: Containers, client: httpx.Client
) -> None:
    await actuator_of(containers).apply(FleetShape(1, 3))

    assert f"{containers.project}-expert-3" in containers.names("expert")
    scale = ("up", "-d", "--no-build", "--no-recreate", "--scale", "expert=2")
    containers.compose(*scale)
    assert len(containers.names("expert")) == 2


def _all(containers: Containers) -> list[str]:
    return [container["Name"] for container in containers.containers()]


def _state(name: str) -> str:
    return docker("inspect", "-f", "{{.State.Status}} {{.State.ExitCode}}", name).strip()


def _networks(name: str) -> set[str]:
    form = "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}"
    return set(docker("inspect", "-f", form, name).split())
