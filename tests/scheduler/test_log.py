"""The log of decisions, whoever dies in the middle of one."""

from typing import Any

from moesaic.cluster.redis.bus import Bus
from moesaic.messages.decisions import DecisionOutcome, PlacementDecision
from moesaic.services.scheduler.log import LOST, DecisionLog


async def noted(log: DecisionLog, tried: int = 0, **outcome: Any) -> PlacementDecision:
    decision = await log.note(cause="traffic", adopted=True, reason="")
    if tried or outcome:
        done = DecisionOutcome(decision_id=decision.decision_id, tried=tried, **outcome)
        await log.note_outcome(done)
    return decision


async def test_a_successor_closes_what_was_open_by_what_was_committed(control):
    log = DecisionLog(control.bus)
    ended = await noted(log, tried=4, epoch=4)
    lost = await noted(log, tried=5)
    never_begun = await noted(log)
    committed = await noted(log, tried=6)
    kept = await log.note(cause="traffic", adopted=False, reason="")

    successor = DecisionLog(control.bus)
    await successor.close(6)

    outcomes = {decision.decision_id: outcome for decision, outcome in successor.recent(10)}
    assert outcomes[ended.decision_id].epoch == 4
    assert outcomes[lost.decision_id].failure == LOST
    assert outcomes[never_begun.decision_id].failure == LOST
    assert outcomes[committed.decision_id].epoch == 6
    assert outcomes[kept.decision_id] is None
    assert successor.outcome_of(6).decision_id == committed.decision_id


async def test_what_seemed_to_fail_but_was_committed_is_put_right(control):
    log = DecisionLog(control.bus)
    decision = await noted(log, tried=7, failure="redis: no answer")

    await log.close(7)

    assert log.outcome_of(7) == DecisionOutcome(
        decision_id=decision.decision_id, tried=7, epoch=7, failure=""
    )


async def test_what_is_decided_without_redis_is_written_when_it_is_back(control):
    log = DecisionLog(control.bus)
    await noted(log, tried=1)
    control.redis.kill()
    decision = await noted(log, tried=2, epoch=2)
    await control.restart_redis()
    await log.refresh()

    async with Bus.connect(control.redis.url, "test") as bus:
        other = DecisionLog(bus)
        await other.refresh()
        assert other.recent(1)[0][0] == decision
        assert other.outcome_of(2) is not None
