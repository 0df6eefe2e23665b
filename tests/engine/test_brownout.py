"""Brownout in a real engine whose experts are slow: thresholds fall and rise, and who is shed hears it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from moesaic.brownout.control.contract import QueueState
from moesaic.brownout.control.ladder import Ladder
from moesaic.brownout.control.predictive import Arrivals
from moesaic.engine.sequences.requests import FailureEvent, FinishEvent, GenerationTask
from moesaic.errors import InvalidInput, Overloaded
from moesaic.messages.brownout import BrownoutPolicy
from tests.engine.rig import LIMITS, Rig, prompts, rig

ANSWER = GenerationTask(max_tokens=4)
AUTO = BrownoutPolicy(mode="auto", slo_ttft_s=0.3, slo_tpot_s=10.0, window_s=1.0)


@dataclass
class Clock:
    """Time that passes only while experts compute, and while a test lets it pass."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def until(self, condition: Callable[[], object]) -> None:
        """Let time pass until a condition holds."""
        while not condition():
            self.now_s += 0.05
            await asyncio.sleep(0.001)  # the engine looks from time to time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of brownout; how busy this machine is does not count."""
    monkeypatch.setattr("moesaic.engine.brownout.REST_S", 0.002)
    return Clock()


@asynccontextmanager
async def slow_rig(tiny_model: Any, policy: BrownoutPolicy, clock: Clock) -> AsyncIterator[Rig]:
    """A layer takes a time for each row, and half of it where thresholds are 0."""
    async with rig(tiny_model, limits=replace(LIMITS, max_num_queued_reqs=1000)) as r:
        dispatch = r.dispatcher.dispatch
        r.engine.brownout.clock = clock

        async def slowly(step: Any, layer: int, hidden_states: Any, promised: Any) -> Any:
            prefill, _ = r.engine.brownout.thresholds
            clock.now_s += 0.0003 * len(hidden_states) * (0.5 + 0.5 * prefill)
            return await dispatch(step, layer, hidden_states, promised)

        r.dispatcher.dispatch = slowly  # type: ignore[method-assign]  # in place of a class of its own
        r.engine.set_brownout(policy)
        yield r


def refusals(r: Rig) -> dict[str, FailureEvent]:
    return {e.key.request_id: e for e in r.events if isinstance(e, FailureEvent)}


async def test_an_overload_is_degraded_then_shed_and_then_all_is_exact_again(
    tiny_model: Any, clock: Clock
) -> None:
    [prompt] = [tokens for tokens in prompts(40).values() if len(tokens) > 30][:1]
    async with slow_rig(tiny_model, AUTO, clock) as r:
        for i in range(12):  # from which the engine learns how fast it is
            r.submit(f"calm{i}", prompt, ANSWER)
            await r.ended(f"calm{i}")

        names: list[str] = []
        while not refusals(r):
            for _ in range(10):  # more than the step of the engine that follows computes
                names.append(f"burst{len(names)}")
                r.submit(names[-1], prompt, ANSWER)
            await asyncio.sleep(0)
        assert r.engine.brownout.thresholds[0] < 1
        r.submit("exact", prompt, ANSWER, min_threshold=1.0)
        refused = refusals(r)
        error = next(iter(refused.values())).error
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        assert "shed" in str(error)
        await r.ended(*names, "exact")
        assert isinstance(r.last("exact"), FinishEvent)
        assert r.engine.load().brownout.num_shed == len(refused) >= 1
        served = next(name for name in names if name not in refused)
        assert r.tokens("exact") == r.tokens(served)

        await clock.until(lambda: r.engine.brownout.thresholds == (1.0, 1.0))
        assert not r.engine.load().brownout.shedding
        r.submit("later", prompt, ANSWER)
        await r.ended("later")
        assert isinstance(r.last("later"), FinishEvent)
        await clock.until(lambda: r.engine.brownout.rest_s is None)
        told = r.engine.brownout.take_decisions()
        made = [*{d.number: d for d in told}.values()]  # each is told again with its result
        assert any(d.prefill < d.prefill_before for d in made)
        assert sum(d.refused for d in made) == len(refused)
        assert (made[-1].prefill, made[-1].shedding) == (1.0, False)
        assert any(d.measured_ttft_s for d in told)


async def test_the_papers_rule_lowers_thresholds_by_measured_latencies_and_sheds_nobody(
    tiny_model: Any, clock: Clock
) -> None:
    policy = BrownoutPolicy(
        mode="paper", slo_ttft_s=0.01, slo_tpot_s=10.0, min_prefill_threshold=0.3
    )
    async with slow_rig(tiny_model, policy, clock) as r:
        asked = prompts(30)
        for name, tokens in asked.items():
            r.submit(name, tokens, ANSWER)
        await r.ended(*asked)

        assert refusals(r) == {}
        assert r.engine.brownout.thresholds == (0.3, 1.0)
        assert r.engine.load().brownout.ttft_p90_s is not None


async def test_without_a_policy_nothing_is_degraded_whatever_happens(
    tiny_model: Any, clock: Clock
) -> None:
    async with slow_rig(tiny_model, BrownoutPolicy(), clock) as r:
        for name, tokens in prompts(30).items():
            r.submit(name, tokens, ANSWER)
        await r.ended(*prompts(30))

        assert r.engine.brownout.thresholds == (1.0, 1.0)
        assert refusals(r) == {}
        assert r.engine.brownout.take_decisions() == []


async def test_thresholds_that_operators_set_hold_from_the_next_step_on(tiny_model: Any) -> None:
    policy = BrownoutPolicy(mode="manual", prefill_threshold=0.5, decode_threshold=0.25)
    async with rig(tiny_model) as r:
        r.engine.set_brownout(policy)
        r.submit("one", [5, 6, 7], ANSWER)
        await r.ended("one")

        assert r.engine.brownout.thresholds == (0.5, 0.25)
        load = r.engine.load().brownout
        assert (load.mode, load.prefill_threshold, load.decode_threshold) == ("manual", 0.5, 0.25)


@pytest.mark.parametrize("how", ["refused", "cancelled", "ended"])
async def test_nothing_is_kept_of_requests_that_are_gone(tiny_model: Any, how: str) -> None:
    async with rig(tiny_model) as r:
        r.submit("one", [] if how == "refused" else [5, 6, 7], ANSWER)
        if how == "cancelled":
            r.engine.cancel(r.engine.batcher.unfinished()[0].request.key)
        else:
            await r.ended("one")
        if how == "refused":
            last = r.last("one")
            assert isinstance(last, FailureEvent)
            assert isinstance(last.error, InvalidInput)

        assert not r.engine.brownout.num_open


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[QueueState]:
    """What the control is told before each step, as it comes."""
    found: list[QueueState] = []
    decide = Ladder.decide

    def decides(ladder: Ladder, state: QueueState) -> Any:
        found.append(state)
        return decide(ladder, state)

    monkeypatch.setattr("moesaic.engine.brownout.DECIDE_EVERY_S", 0.0)
    monkeypatch.setattr(Ladder, "decide", decides)
    return found


NEVER_LATE = BrownoutPolicy(mode="auto", slo_ttft_s=60.0, slo_tpot_s=60.0)


@pytest.mark.parametrize("lacking", ["places", "blocks"])
async def test_the_control_hears_of_places_and_of_the_length_of_answers(
    tiny_model: Any, states: list[QueueState], monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    lengths: list[int] = []
    monkeypatch.setattr(Arrivals, "ended", lambda _, tokens: lengths.append(tokens))
    most = 2 if lacking == "places" else 8
    limits = replace(LIMITS, max_num_seqs=most)
    async with rig(tiny_model, num_blocks=64 if lacking == "places" else 4, limits=limits) as r:
        r.engine.set_brownout(NEVER_LATE)
        for i in range(5):
            r.submit(str(i), [5 + i] * 20, GenerationTask(max_tokens=6))
        await r.ended(*map(str, range(5)))

    assert lengths == [6] * 5
    full = [state for state in states if state.waiting_requests and state.answers == 2]
    assert full
    assert {(state.places, state.free_places) for state in full} == {(2, 0)}
    assert states[-1].places == most


async def test_an_engine_that_lacked_blocks_and_stands_still_has_a_place(
    tiny_model: Any, states: list[QueueState]
) -> None:
    async with rig(tiny_model, num_blocks=2) as r:
        r.engine.set_brownout(NEVER_LATE)
        for i in range(12):
            r.submit(str(i), [5 + i] * 20, GenerationTask(max_tokens=6))
        await r.ended(*map(str, range(12)))

    assert any(state.waiting_requests and not state.answers for state in states)
    assert all(state.places >= 1 and 0 <= state.free_places <= state.places for state in states)
