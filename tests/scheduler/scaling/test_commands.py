"""The commands of scaling, beside schedulers whose workers only say what they are told."""

import asyncio
import json
from typing import Any

from moesaic.cluster.registry import registered
from moesaic.messages.registry import WorkerRecord
from moesaic.v1 import scheduler_pb2 as pb
from tests.scheduler.test_commands import run


async def test_the_policy_is_set_in_parts_and_shown(suite: Any) -> None:
    scheduler = await suite.scheduler()
    address = (await scheduler.until("service.ready"))["admin_address"]
    await scheduler.until("leader.changed", leads=True)
    status, out, err = await run(
        address, "scale", "set", "--mode", "advise", "--max-experts", "6", "--json"
    )
    assert status == 0, err
    assert json.loads(out)["max_experts"] == 6
    status, out, err = await run(address, "scale", "set", "--attainment", "0.95")
    assert status == 0, err
    assert out.startswith("mode advise; ")

    status, out, err = await run(address, "scale", "show", "--json")

    assert status == 0, err
    policy = json.loads(out)["policy"]
    assert (policy["mode"], policy["max_experts"], policy["attainment"]) == ("advise", 6, 0.95)


async def test_what_makes_no_sense_is_refused_with_the_field_and_the_fix(suite: Any) -> None:
    scheduler = await suite.scheduler()
    address = (await scheduler.until("service.ready"))["admin_address"]
    await scheduler.until("leader.changed", leads=True)

    for arguments, told in (
        (("to", "fish"), "must be like 2A4E"),
        (("to", "9A9E"), "shape.attention: must be in 0..0, got 9"),
        (("set", "--mode", "manual"), "--mode: must be one of off, advise, auto"),
        (("set", "--headroom", "0.5"), "--headroom: must be in 1..10, got 0.5"),
        (("set", "--min-experts", "3", "--max-experts", "2"), "--max-experts: must be 0 for any"),
        (("set",), "nothing to set"),
    ):
        status, _, err = await run(address, "scale", *arguments)
        assert (status, told in err) == (2, True), err


async def test_a_setting_of_the_start_is_the_policy_until_an_operator_sets_one(suite: Any) -> None:
    scheduler = await suite.scheduler("--scaling", "advise")
    async with scheduler.stub() as stub:
        found = await stub.GetScaling(pb.GetScalingRequest())

    assert (found.policy.mode, found.policy.cool_down_s) == ("advise", 60)
    assert (found.actuator, found.HasField("action"), list(found.decisions)) == (
        "standby",
        False,
        [],
    )


async def test_two_schedulers_have_one_policy(suite: Any) -> None:
    first = await suite.scheduler()
    await first.until("leader.changed", leads=True)
    second = await suite.scheduler(worker_id="scheduler-1")
    async with first.stub() as leading, second.stub() as waiting:
        policy = pb.ScalingPolicy(mode="advise", interval_s=600)
        await leading.SetScaling(pb.SetScalingRequest(policy=policy))
        while True:
            found = await waiting.GetScaling(pb.GetScalingRequest())
            if found.policy.mode == "advise":
                break
            await asyncio.sleep(0.05)


def attention_worker(number: int, **fields: Any) -> WorkerRecord:
    """Make the record of a worker that nobody can reach."""
    return WorkerRecord(
        worker_id=f"attention-{number}",
        generation=1,
        role="attention",
        admin_address="127.0.0.1:9",
        **fields,
    )


async def test_who_waits_for_a_shape_is_told_what_became_of_its_own_order(suite: Any) -> None:
    scheduler = await suite.scheduler()
    address = (await scheduler.until("service.ready"))["admin_address"]
    await scheduler.until("leader.changed", leads=True)
    async with (
        registered(suite.bus, attention_worker(0, state="ready")),
        registered(suite.bus, attention_worker(1, state="standby", standing_by=True)),
        registered(suite.bus, attention_worker(2, state="standby", standing_by=True)),
        scheduler.stub() as stub,
    ):
        while (await stub.GetScaling(pb.GetScalingRequest())).most.attention < 3:
            await asyncio.sleep(0.05)

        status, out, err = await run(address, "scale", "to", "1A0E", "--json")
        assert (status, json.loads(out)["decisions"]) == (0, []), err

        waiting = asyncio.create_task(run(address, "scale", "to", "2A0E", "--timeout", "60"))
        while not (await stub.GetScaling(pb.GetScalingRequest())).HasField("action"):
            await asyncio.sleep(0.05)
        again = pb.ScaleRequest(shape=pb.FleetShape(attention=2))
        action = (await stub.GetScaling(pb.GetScalingRequest())).action
        assert (await stub.Scale(again)).decision_id == action.decision_id

        other = pb.ScaleRequest(shape=pb.FleetShape(attention=3))
        assert (await stub.Scale(other)).decision_id not in ("", action.decision_id)
        status, _, err = await waiting
        assert (status, "2A0E: another shape was wanted" in err) == (1, True), err
