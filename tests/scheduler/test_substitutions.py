"""United experts come and go with the policy of brownout; what cannot be loaded keeps nobody from serving."""

from typing import Any

import pytest

from moesaic.errors import CheckpointError, MoesaicError
from moesaic.messages.placement import Placement
from moesaic.messages.substitution import Substitution
from moesaic.placement.decide.stand_ins import own_part
from moesaic.v1 import scheduler_pb2 as pb
from tests.scheduler.conftest import NUM_EXPERTS, Suite

PAIRS = Substitution(way=2, instead="united")


async def set_policy(stub: Any, **fields: Any) -> None:
    policy = pb.BrownoutPolicy(mode="manual", **fields)
    await stub.SetBrownout(pb.SetBrownoutRequest(policy=policy))


async def until_substituted(suite: Suite, substitution: Substitution) -> Placement:
    while suite.view.current is None or suite.view.current.substitution != substitution:
        await suite.view.changed()
    return suite.view.current


async def placed_with_two_more(suite: Suite, before: int) -> list[Placement]:
    """The placements after two workers have come, one after the other: the next two epochs, with no try between."""
    found = []
    async with suite.expert("c") as c:
        found.append(await c.until_epoch(before + 1))
        async with suite.expert("d") as d:
            found.append(await d.until_epoch(before + 2))
    assert [placement.epoch for placement in found] == [before + 1, before + 2]
    return found


async def test_a_way_adds_united_experts_and_another_replaces_them(suite: Any) -> None:
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b") as b, scheduler.stub() as stub:
        first = await b.until_epoch(1)
        await set_policy(stub, way=2)
        pairs = await until_substituted(suite, PAIRS)
        await set_policy(stub, way=4, rule="instances")
        fours = await until_substituted(
            suite, Substitution(way=4, instead="united", rule="instances")
        )
        await set_policy(stub, way=0, rule="tokens")
        none = await until_substituted(suite, Substitution(instead="fewer"))

        for placement, num_united in ((pairs, 4), (fours, 2), (none, 0)):
            assert (placement.num_own, placement.num_united) == (NUM_EXPERTS, num_united)
            assert own_part(placement).slots == first.slots
        await a.until_epoch(none.epoch)
        told = (await stub.GetDecisions(pb.GetDecisionsRequest())).decisions
        assert sum("are to be degraded by" in decision.reason for decision in told) == 3


async def test_a_worker_that_comes_gets_its_part_of_the_united_experts(suite: Any) -> None:
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8), scheduler.stub() as stub:
        await suite.until_epoch(1)
        await set_policy(stub, way=2)
        alone = await until_substituted(suite, PAIRS)
        async with suite.expert("b", slots=8) as b:
            both = await b.until_epoch(alone.epoch + 1)

        assert both.substitution == PAIRS
        assert all(any(e >= NUM_EXPERTS for e in held) for layer in both.slots for held in layer)


@pytest.mark.slow
async def test_united_experts_that_cannot_be_loaded_are_done_without(suite: Any) -> None:
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b"), scheduler.stub() as stub:
        a.united_fail_with = CheckpointError("united-way-2.safetensors", "is damaged")
        first = await a.until_epoch(1)
        await set_policy(stub, way=2)

        without = await until_substituted(suite, Substitution(instead="fewer"))

        assert own_part(without).slots == first.slots
        refused = await scheduler.until("substitution.refused")
        assert "is damaged" in refused["cause"]
        a.united_fail_with = None
        later = await placed_with_two_more(suite, without.epoch)
        assert {placement.substitution for placement in later} == {without.substitution}


async def test_united_experts_that_differ_between_workers_are_not_used(suite: Any) -> None:
    scheduler = await suite.scheduler()
    ours, theirs = {2: "0123", 4: "89ab"}, {2: "4567", 4: "89ab"}
    async with (
        suite.expert("a", united=ours),
        suite.expert("b", united=theirs) as b,
        scheduler.stub() as stub,
    ):
        await b.until_epoch(1)
        await set_policy(stub, way=2)
        await until_substituted(suite, Substitution(instead="fewer"))
        refused = await scheduler.until("substitution.refused")
        assert "a, b" in refused["cause"]

        await set_policy(stub, way=4)
        await until_substituted(suite, Substitution(way=4, instead="united"))


async def test_united_experts_are_used_once_they_are_the_same_everywhere(suite: Any) -> None:
    scheduler = await suite.scheduler()
    async with suite.expert("a", slots=8, united={2: "0123"}), scheduler.stub() as stub:
        async with suite.expert("b", slots=8, united={2: "4567"}) as b:
            await b.until_epoch(1)
            await set_policy(stub, way=2)
            await until_substituted(suite, Substitution(instead="fewer"))
        await until_substituted(suite, PAIRS)


@pytest.mark.slow
async def test_a_substitution_that_was_refused_is_not_tried_again_by_itself(suite: Any) -> None:
    scheduler = await suite.scheduler()
    async with suite.expert("a") as a, suite.expert("b"), scheduler.stub() as stub:
        await a.until_epoch(1)
        await set_policy(stub, way=2)
        pairs = await until_substituted(suite, PAIRS)
        a.united_fail_with = MoesaicError("no memory")

        await set_policy(stub, way=4)
        refused = await scheduler.until("substitution.refused")
        assert (refused["way"], refused["cause"]) == (4, "a: internal: no memory")
        assert suite.view.epoch == pairs.epoch  # what there is stays
        a.united_fail_with = None
        later = await placed_with_two_more(suite, pairs.epoch + 1)
        assert {placement.substitution for placement in later} == {PAIRS}
