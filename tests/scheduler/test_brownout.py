"""The policy of brownout, set over gRPC and by commands, reaches workers and outlives schedulers."""

import asyncio
import json
from typing import Any

import grpc
import pytest

from moesaic.cluster.brownout_view import DECISIONS, watch_brownout
from moesaic.cluster.redis.bus import Bus
from moesaic.messages.brownout import BrownoutDecision, BrownoutInputs, BrownoutPolicy
from moesaic.v1 import scheduler_pb2 as pb
from tests.scheduler.test_commands import run

DECIDED = BrownoutDecision(
    number=1,
    worker_id="attention-0",
    generation=7,
    at=1000.0,
    reason="a target would be missed",
    mode="auto",
    prefill=0.5,
    shedding=True,
    refused=3,
    inputs=BrownoutInputs(waiting_requests=9, ttft_p90_s=0.4),
    predicted_ttft_s=0.2,
)


async def policy_of(stub: Any) -> pb.BrownoutPolicy:
    found = await stub.GetBrownout(pb.GetBrownoutRequest())
    return found.policy


async def until_policy(bus: Bus, **fields: object) -> BrownoutPolicy:
    async for policy in watch_brownout(bus):
        if {name: getattr(policy, name) for name in fields} == fields:
            return policy
    raise AssertionError


async def test_what_is_set_reaches_workers_and_the_rest_stays(suite: Any) -> None:
    scheduler = await suite.scheduler()
    async with scheduler.stub() as stub:
        assert (await until_policy(suite.bus)).mode == "off"
        await scheduler.until("leader.changed", leads=True)
        wanted = pb.BrownoutPolicy(mode="manual", prefill_threshold=0.0, way=4)
        answer = await stub.SetBrownout(pb.SetBrownoutRequest(policy=wanted))
        assert (answer.policy.mode, answer.policy.decode_threshold) == ("manual", 1.0)

        found = await until_policy(suite.bus, mode="manual")

        expected = BrownoutPolicy(
            mode="manual", prefill_threshold=0.0, way=4, version=found.version
        )
        assert found == expected
        assert found.version > 0
        later = pb.BrownoutPolicy(slo_ttft_s=1.5)
        await stub.SetBrownout(pb.SetBrownoutRequest(policy=later))
        assert (await until_policy(suite.bus, slo_ttft_s=1.5)).prefill_threshold == 0.0


async def test_a_policy_that_makes_no_sense_is_refused_and_nothing_changes(suite: Any) -> None:
    scheduler = await suite.scheduler("--brownout", "auto")
    async with scheduler.stub() as stub:
        await scheduler.until("leader.changed", leads=True)
        before = await policy_of(stub)
        for wrong, fix in (
            (pb.BrownoutPolicy(mode="on"), "mode: must be one of off, manual, paper, auto"),
            (pb.BrownoutPolicy(mode="off", way=3), "way: must be 0 for none, or 2, 4, 8"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=fix) as caught:
                await stub.SetBrownout(pb.SetBrownoutRequest(policy=wrong))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await policy_of(stub) == before
        assert before.mode == "auto"


async def test_a_redis_that_lost_everything_gets_the_policy_back(suite: Any) -> None:
    scheduler = await suite.scheduler("--brownout", "paper")
    assert (await until_policy(suite.bus, mode="paper")).version == 0
    async with scheduler.stub() as stub:
        await scheduler.until("leader.changed", leads=True)
        wanted = pb.BrownoutPolicy(mode="auto", slo_ttft_s=2.0)
        await stub.SetBrownout(pb.SetBrownoutRequest(policy=wanted))
        suite.redis.kill(lose_data=True)
        suite.redis.start()

        assert (await until_policy(suite.bus, mode="auto")).slo_ttft_s == 2.0


async def test_decisions_of_workers_are_listed_with_their_results_once(suite: Any) -> None:
    scheduler = await suite.scheduler()
    async with scheduler.stub() as stub:
        await suite.bus.append(DECISIONS, DECIDED)
        measured = BrownoutDecision(**{**_fields(DECIDED), "measured_ttft_s": 0.21})
        await suite.bus.append(DECISIONS, measured)
        while True:
            found = await stub.GetBrownout(pb.GetBrownoutRequest())
            if found.decisions and found.decisions[0].HasField("measured_ttft_s"):
                break
            await asyncio.sleep(0.05)
        [decision] = found.decisions
        assert decision.decision_id == "attention-0/7/1"
        assert (decision.prefill, decision.refused, decision.waiting_requests) == (0.5, 3, 9)
        assert (decision.ttft_p90_s, decision.HasField("tpot_p90_s")) == (0.4, False)
        placements = await stub.GetDecisions(pb.GetDecisionsRequest())
        assert list(placements.decisions) == []
    await scheduler.kill()

    successor = await suite.scheduler()
    async with successor.stub() as stub:
        await successor.until("leader.changed", leads=True)
        again = await stub.GetBrownout(pb.GetBrownoutRequest())
        assert list(again.decisions) == [decision]


async def test_commands_show_and_set_the_policy(suite: Any) -> None:
    scheduler = await suite.scheduler()
    address = (await scheduler.until("service.ready"))["admin_address"]
    await scheduler.until("leader.changed", leads=True)
    await suite.bus.append(DECISIONS, DECIDED)

    changes = ("--mode", "auto", "--slo-ttft", "0.5", "--min-prefill-threshold", "0.25")
    changes += ("--min-decode-threshold", "0.25")
    code, said, _ = await run(address, "brownout", "set", *changes)
    assert (code, said) == (
        0,
        "mode auto; targets: TTFT 0.5 s, TPOT 0.15 s; thresholds at least 0.25, 0.25; "
        "fewer experts; rule tokens\n",
    )
    while True:
        code, shown, _ = await run(address, "brownout", "show", "--json")
        facts = json.loads(shown)
        assert (code, facts["policy"]["slo_ttft_s"], facts["workers"]) == (0, 0.5, [])
        if facts["decisions"]:
            break
    code, shown, _ = await run(address, "brownout", "show")
    assert "mode auto" in shown
    assert "1.00 -> 0.50" in shown
    assert "a target would be missed" in shown

    for wrong, status, fix in (
        (("--mode", "on"), 2, "--mode: must be one of"),
        (("--prefill-threshold", "2"), 2, "--prefill-threshold: must be in 0..1"),
        ((), 2, "nothing to set"),
        (("--way", "-2"), 2, "--way must be in 0..4096"),
    ):
        code, _, said = await run(address, "brownout", "set", *wrong)
        assert (code, fix in said) == (status, True), said


def _fields(decision: BrownoutDecision) -> dict[str, Any]:
    return {name: getattr(decision, name) for name in decision.__struct_fields__}
