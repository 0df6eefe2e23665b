"""The scheduler's actuator of compose on a real engine: workers come and go under load."""

import os
import time

import httpx

from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.compose import ComposeActuator
from tests.compose.containers import Containers, docker
from tests.compose.load import Answers, Load
from tests.waiting import eventually

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

        container, since = docker("inspect", "-f", "{{.Id}}", new).strip(), int(time.time()) - 1
        await actuator_of(containers).apply(FleetShape(1, 2))
        await actuator_of(containers).apply(FleetShape(1, 2))
        # Events, for the container is removed by the second call if it has ended by then.
        eventually(lambda: any(event.startswith("die") for event in _events(container, since)))
        events = _events(container, since)
        assert [event for event in events if event.startswith(("kill", "die"))] == ["kill", "die 0"]
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


def _events(container: str, since: int) -> list[str]:
    """What the engine did with a container since a time of day, with its exit status where it ended."""
    form = "{{.Action}} {{.Actor.Attributes.exitCode}}"
    times = ("--since", str(since), "--until", str(int(time.time()) + 1))
    lines = docker("events", *times, "--filter", f"container={container}", "--format", form)
    return [line.replace("<no value>", "").strip() for line in lines.splitlines()]


def _networks(name: str) -> set[str]:
    form = "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{end}}"
    return set(docker("inspect", "-f", form, name).split())
