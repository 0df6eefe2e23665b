"""The engine when experts go away, time runs out, or callers do."""

import asyncio
import time
from typing import Any

import pytest

from moesaic.costs import fitted
from moesaic.engine.sequences.requests import (
    FailureEvent,
    FinishEvent,
    GenerationTask,
    RequestKey,
    Sampling,
    ScoringTask,
)
from moesaic.errors import DeadlineExceeded, ExpertUnavailable
from moesaic.messages.performance import PART_TERMS
from tests.engine.rig import LIMITS, NUM_LAYERS, prompts, rig


async def test_a_failed_step_is_run_again_and_nobody_notices(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        asked = prompts(6)
        for name, tokens in asked.items():
            r.submit(name, tokens, GenerationTask(max_tokens=8))
        r.submit("score", [4, 5, 6], ScoringTask(((7, 8), (9,))))
        await r.until(lambda: len(r.events) >= 10)
        r.dispatcher.failures = 5
        await r.ended(*asked, "score")

        for name, tokens in asked.items():
            assert r.tokens(name) == tiny_model.greedy(tokens, 8)


async def test_requests_wait_for_experts_that_come_back(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.dispatcher.gone = True
        r.submit("patient", [4, 5, 6], GenerationTask(max_tokens=3))
        await r.dispatcher.sought.wait()
        assert not r.events
        r.dispatcher.gone = False
        await r.ended("patient")

        assert r.tokens("patient") == tiny_model.greedy([4, 5, 6], 3)


@pytest.mark.parametrize("away", [False, True])
async def test_costs_of_steps_are_without_the_time_that_nothing_could_be_done(
    tiny_model: Any, away: bool
) -> None:
    tokens, now_s = [4, 5, 6], 0.0

    async with rig(tiny_model) as r:
        r.engine.ledger.clock = lambda: now_s
        r.engine.ledger.resumed()
        dispatch = r.dispatcher.dispatch

        async def takes_10_ms(*step: Any) -> Any:
            nonlocal now_s
            now_s += 0.01
            return await dispatch(*step)

        r.dispatcher.dispatch = takes_10_ms  # type: ignore[method-assign]  # in place of a class of its own
        for name in "abcd":
            r.dispatcher.gone = away
            if away:
                r.dispatcher.sought.clear()
                r.submit(name, tokens, GenerationTask(max_tokens=1))
                await r.dispatcher.sought.wait()
            for _ in range(3):
                await asyncio.sleep(0)  # the engine comes to rest
            now_s += 60.0
            r.dispatcher.gone = False
            if not away:
                r.submit(name, tokens, GenerationTask(max_tokens=1))
            await r.ended(name)
        costs = r.engine.take_report().costs

    step, choice = fitted(PART_TERMS["step"], costs["step"]), r.engine.ledger.choice
    seconds = step.seconds(1, choice.experts(3), 3, 0, 0, 6)
    assert seconds == pytest.approx(0.01 * NUM_LAYERS)


async def test_requests_give_up_with_a_typed_error_when_experts_stay_away(tiny_model: Any) -> None:
    async with rig(tiny_model, recovery_s=0.2) as r:
        r.dispatcher.gone = True
        r.submit("waits", [4, 5, 6], GenerationTask(max_tokens=3))
        r.submit("scores", [4, 5, 6], ScoringTask(((1,),)))
        await r.ended("waits", "scores")

        failure = r.last("waits")
    assert isinstance(failure, FailureEvent)
    assert isinstance(failure.error, ExpertUnavailable)
    assert failure.error.retryable


async def test_a_deadline_ends_a_request_even_while_experts_are_away(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.dispatcher.gone = True
        r.submit(
            "late",
            [4],
            GenerationTask(max_tokens=3),
            deadline_s=time.monotonic() + 0.1,
            budget_ms=100,
        )
        await r.ended("late")

        failure = r.last("late")
    assert isinstance(failure, FailureEvent)
    assert isinstance(failure.error, DeadlineExceeded)


async def test_a_cancelled_request_tells_nothing_more(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("unwanted", [4, 5], GenerationTask(max_tokens=200))
        r.submit("wanted", [4, 5], GenerationTask(max_tokens=20))
        await r.until(lambda: r.events)
        r.engine.cancel(RequestKey("unwanted"))
        told = len(r.tokens("unwanted"))
        await r.ended("wanted")

        assert len(r.tokens("unwanted")) == told
        assert not isinstance(r.last("unwanted"), FinishEvent | FailureEvent)


async def test_who_waited_for_a_turn_has_not_waited_for_experts(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.dispatcher.gone = True
        names = [f"r{i}" for i in range(LIMITS.max_num_seqs + 4)]
        for name in names:
            r.submit(name, [4, 5, 6], GenerationTask(max_tokens=8))
        everything = r.engine.batcher.unfinished
        await r.dispatcher.sought.wait()
        assert all(sequence.stalled_since_s for sequence in everything())
        r.dispatcher.gone = False
        await r.until(lambda: r.events)

        assert r.engine.batcher.waiting
        assert not any(sequence.stalled_since_s for sequence in everything())
        await r.ended(*names)


async def test_an_answer_that_cannot_be_picked_fails_its_step_and_not_the_engine(
    tiny_model: Any,
) -> None:
    impossible = GenerationTask(max_tokens=5, sampling=Sampling(logit_bias=((10**9, 1.0),)))

    async with rig(tiny_model) as r:
        r.submit("first", [4, 5, 6], GenerationTask(max_tokens=1))
        r.submit("impossible", [5, 6, 7], impossible)
        await r.ended("first", "impossible")
        r.submit("later", [4, 5, 6], GenerationTask(max_tokens=3))
        await r.ended("later")

        assert isinstance(r.last("first"), FailureEvent)
        assert isinstance(r.last("impossible"), FailureEvent)
        assert r.tokens("later") == tiny_model.greedy([4, 5, 6], 3)


async def test_a_deadline_ends_a_request_between_two_steps(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        now = time.monotonic()
        r.submit("late", [4], GenerationTask(max_tokens=200), deadline_s=now + 0.005, budget_ms=5)
        r.submit("in time", [4], GenerationTask(max_tokens=20))
        await r.ended("late", "in time")

        failure = r.last("late")
    assert isinstance(failure, FailureEvent)
    assert isinstance(failure.error, DeadlineExceeded)
    assert isinstance(r.last("in time"), FinishEvent)
