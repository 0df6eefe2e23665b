"""The actuator of compose, with a fake engine; tests/compose has it with a real one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.errors import InvalidInput, NotReady
from moesaic.messages.scaling import FleetShape
from moesaic.services.scheduler.scaling.actuators.compose import ComposeActuator
from tests.scheduler.actuators.fake_engine import FakeEngine, engine_at

MOST = FleetShape(2, 4)


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "engine.sock"


@pytest.fixture
def engine(socket: Path) -> Iterator[FakeEngine]:
    """One attention worker and two of experts."""
    with engine_at(socket) as engine:
        for service, number in (("attention", 1), ("expert", 1), ("expert", 2)):
            engine.add(service, number)
        yield engine


@pytest.fixture
def clock() -> _Clock:
    return _Clock()


def actuator_at(socket: Path, clock: _Clock | None = None) -> ComposeActuator:
    return ComposeActuator(f"unix://{socket}", "suite", most=MOST, clock=clock or _Clock())


@pytest.fixture
def actuator(socket: Path, clock: _Clock) -> ComposeActuator:
    return actuator_at(socket, clock)


async def test_a_missing_worker_is_a_copy_of_one_that_is_there(
    engine: FakeEngine, actuator: ComposeActuator
) -> None:
    await actuator.apply(FleetShape(1, 3))

    assert engine.names("running") == [
        "suite-attention-1",
        "suite-expert-1",
        "suite-expert-2",
        "suite-expert-3",
    ]
    old, new = (
        next(c for c in engine.containers.values() if c["Name"] == f"/suite-expert-{number}")
        for number in (2, 3)
    )
    assert new["HostConfig"] == old["HostConfig"]
    assert new["Config"]["Env"] == old["Config"]["Env"]
    assert new["Config"]["StopTimeout"] == 45
    assert new["Config"]["Labels"]["com.docker.compose.container-number"] == "3"


async def test_a_copy_has_its_own_name_and_address_on_the_same_networks(
    engine: FakeEngine, actuator: ComposeActuator
) -> None:
    await actuator.apply(FleetShape(1, 3))

    new = next(c for c in engine.containers.values() if c["Name"] == "/suite-expert-3")
    endpoint = new["NetworkSettings"]["Networks"]["suite_control"]
    assert endpoint == {"Aliases": ["expert", "expert.control", "suite-expert-3"]}
    assert new["Config"]["Hostname"] == new["Id"][:12]


async def test_the_newest_stop_first_and_are_removed_once_they_have_ended(
    engine: FakeEngine, actuator: ComposeActuator
) -> None:
    engine.add("expert", 3)

    await actuator.apply(FleetShape(1, 1))

    assert engine.names("running") == ["suite-attention-1", "suite-expert-1"]
    assert set(engine.signals.values()) == {1}

    await actuator.apply(FleetShape(1, 1))

    assert engine.names("running", "exited") == ["suite-attention-1", "suite-expert-1"]


@pytest.mark.parametrize(
    "state",
    [{"Status": "running", "Text": "Up 5 minutes (unhealthy)"}, {"Status": "restarting"}],
)
async def test_workers_that_do_not_work_stop_before_those_that_do(
    engine: FakeEngine, actuator: ComposeActuator, state: dict[str, str]
) -> None:
    sick = next(c for c in engine.containers.values() if c["Name"] == "/suite-expert-1")
    sick["State"].update(state)
    assert await actuator.intended() == FleetShape(1, 2)

    await actuator.apply(FleetShape(1, 1))

    assert engine.names("running") == ["suite-attention-1", "suite-expert-2"]
    assert await actuator.intended() == FleetShape(1, 1)


async def test_a_worker_that_leaves_is_replaced_rather_than_called_back(
    engine: FakeEngine, actuator: ComposeActuator
) -> None:
    engine.drains = True
    await actuator.apply(FleetShape(1, 1))

    await actuator.apply(FleetShape(1, 2))

    assert "suite-expert-3" in engine.names("running")
    assert [*engine.signals.values()] == [1]


async def test_a_worker_whose_scheduler_died_before_telling_it_is_told_when_it_is_late(
    engine: FakeEngine, actuator: ComposeActuator, clock: _Clock
) -> None:
    worker = engine.add("expert", 3)
    engine.containers[worker]["Name"] = "/suite-expert-3-leaving"
    await actuator.apply(FleetShape(1, 2))

    clock.now_s = 74.0  # 45 s are its own time for stopping, and 30 s are waited beyond
    await actuator.apply(FleetShape(1, 2))
    assert engine.signals == {}

    clock.now_s = 76.0
    await actuator.apply(FleetShape(1, 2))
    assert engine.signals == {worker: 1}


async def test_a_container_that_was_made_and_never_started_is_started(
    engine: FakeEngine, actuator: ComposeActuator
) -> None:
    engine.add("expert", 3, state="created")

    await actuator.apply(FleetShape(1, 3))

    assert "suite-expert-3" in engine.names("running")
    assert len(engine.containers) == 4


async def test_the_last_container_of_a_side_stays_for_the_next_ones(
    engine: FakeEngine, actuator: ComposeActuator
) -> None:
    for _ in range(3):
        await actuator.apply(FleetShape(1, 0))
    assert engine.names("running") == ["suite-attention-1"]
    assert len(engine.names("exited")) == 1

    await actuator.apply(FleetShape(1, 2))

    assert len(engine.names("running")) == 3
    assert not any(name.endswith("leaving") for name in engine.names("running"))


async def test_containers_of_others_are_left_alone(
    engine: FakeEngine, actuator: ComposeActuator
) -> None:
    engine.add("expert", 1, project="other")
    engine.add("expert", 2, project="other", state="exited")
    engine.add("gateway", 1)

    await actuator.apply(FleetShape(1, 0))
    await actuator.apply(FleetShape(1, 1))

    assert {"other-expert-1", "suite-gateway-1"} <= set(engine.names("running"))
    assert engine.names("exited") == ["other-expert-2"]


async def test_a_side_without_a_container_to_copy_is_told_by_the_setting(
    engine: FakeEngine, socket: Path
) -> None:
    actuator = ComposeActuator(f"unix://{socket}", "siute", most=MOST)

    with pytest.raises(InvalidInput, match="'siute' has no container") as refused:
        await actuator.apply(FleetShape(1, 1))

    assert refused.value.field == "scaling_compose_project"


async def test_the_most_is_what_operators_gave_while_the_engine_answers(
    engine: FakeEngine, actuator: ComposeActuator, tmp_path: Path
) -> None:
    assert await actuator.most() == MOST

    with pytest.raises(NotReady, match=r"nowhere\.sock cannot be reached"):
        await actuator_at(tmp_path / "nowhere.sock").most()


async def test_what_the_engine_refuses_is_told_in_its_words(
    engine: FakeEngine, actuator: ComposeActuator
) -> None:
    engine.refusal = "no space left on device"

    with pytest.raises(NotReady, match="no space left on device"):
        await actuator.apply(FleetShape(1, 3))


@pytest.mark.parametrize("socket", ["/var/run/docker.sock", "ssh://host", "tcp://", "tcp://h:x"])
def test_an_address_that_cannot_be_one_is_refused_by_its_setting(socket: str) -> None:
    with pytest.raises(InvalidInput, match=r"unix:///path, tcp://host:port") as refused:
        ComposeActuator(socket, "suite", most=MOST)

    assert refused.value.field == "scaling_compose_socket"
