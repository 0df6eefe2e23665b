"""Numbers of workers change under load, and what is wanted outlives the scheduler that was told."""

import signal

import grpc
import pytest

from moesaic.v1 import scheduler_pb2 as pb
from tests.system.asking import under_load
from tests.system.control import paused
from tests.system.scaling.fleets import LARGE, SMALL, WORKERS, Fleet
from tests.waiting import until


async def test_workers_come_and_go_under_load_and_no_request_is_lost(
    fleet: Fleet, right: list[str]
) -> None:
    await fleet.scaled_to(SMALL)

    async with under_load(fleet.suite.url, right) as load:
        grown = await fleet.scaled_to(LARGE)
        await load.round()
        shrunk = await fleet.scaled_to(SMALL)
        await load.round()

    assert (grown.failure, shrunk.failure) == ("", "")
    assert (grown.cause, grown.adopted) == ("operator", True)
    assert (grown.before, grown.wanted) == (SMALL, LARGE)
    assert fleet.resting() == ["attention", "expert"]


@pytest.mark.slow
@pytest.mark.parametrize("told", [False, True])
async def test_the_next_scheduler_ends_what_a_killed_one_began_and_repeats_nothing(
    fleet: Fleet, told: bool
) -> None:
    await fleet.scaled_to(SMALL)
    before, activations = await fleet.scaling(), fleet.activations()
    known = {name: len(fleet.states(name)) for name in WORKERS}

    decision_id = await fleet.want(LARGE)
    if told:  # kill it once it has told one worker at least
        await fleet.until_activated(activations + 1)
    fleet.suite.signal("scheduler", signal.SIGKILL)
    decision = await fleet.ended(decision_id)

    await until(lambda: not fleet.resting())
    after = await fleet.scaling()
    assert not decision.failure
    assert after.shape == LARGE
    assert after.action.number == before.action.number + 1
    assert sum(each.decision_id == decision_id for each in after.decisions) == 1
    became = [fleet.states(name)[count:] for name, count in known.items()]
    assert [states for states in became if states] == [["ready"], ["ready"]]
    # Each was told once; a scheduler that is killed right then does not log it any more.
    assert fleet.activations() <= activations + 2


@pytest.mark.slow
async def test_advice_changes_nothing(fleet: Fleet) -> None:
    await fleet.scaled_to(SMALL)
    before = {name: len(fleet.states(name)) for name in WORKERS}

    # Too few for the policy: it would have one worker of each side more.
    await fleet.set(mode="advise", interval_s=0.5, min_attention=2, min_experts=3)
    advice = await until(fleet.advice)
    await fleet.set(mode="off", min_attention=1, min_experts=1)

    after = await fleet.scaling()
    assert (advice.wanted, advice.adopted) == (LARGE, False)
    assert (after.shape, after.action.decision_id == advice.decision_id) == (SMALL, False)
    assert {name: len(fleet.states(name)) for name in WORKERS} == before


async def test_in_mode_auto_what_is_decided_is_done(fleet: Fleet) -> None:
    await fleet.scaled_to(SMALL)
    before = (await fleet.scaling()).action.number

    await fleet.set(mode="auto", interval_s=0.5, cool_down_s=0, min_attention=2, min_experts=3)
    await fleet.until_shape(LARGE)
    await fleet.set(mode="off", min_attention=1, min_experts=1)

    after = await fleet.scaling()
    done = await fleet.ended(after.action.decision_id)
    assert (done.cause, done.wanted, done.failure) == ("bounds", LARGE, "")
    assert after.action.number == before + 1


@pytest.mark.slow
async def test_a_worker_on_standby_that_dies_is_not_picked(fleet: Fleet) -> None:
    await fleet.scaled_to(SMALL)
    [resting] = [n for n in WORKERS if n.startswith("expert") and fleet.states(n)[-1] == "standby"]

    async def lease_is_over() -> bool:
        return (await fleet.scaling()).most.experts == SMALL.experts

    with paused(fleet.suite, resting):
        await until(lease_is_over)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fleet.want(LARGE)
        assert "shape.experts" in str(refused.value.details())
        grown = await fleet.scaled_to(pb.FleetShape(attention=2, experts=2))

    assert not grown.failure
    assert fleet.states(resting)[-1] == "standby"


@pytest.mark.slow
async def test_too_few_or_too_many_workers_are_refused_before_anything_is_done(
    fleet: Fleet,
) -> None:
    await fleet.scaled_to(SMALL)

    for attention, experts in ((0, 2), (1, 0), (3, 2), (1, 4)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await fleet.want(pb.FleetShape(attention=attention, experts=experts))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    assert (await fleet.scaling()).shape == SMALL
