"""The engine on a real decoder: what it answers is what a plain forward pass answers, whatever
happens around it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.batching import Limits
from moesaic.engine.engine import Engine
from moesaic.engine.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    Generation,
    Request,
    RequestKey,
    Sampling,
    ScoreEvent,
    Scoring,
    TokenEvent,
)
from moesaic.errors import DeadlineExceeded, ExpertUnavailable, NotReady
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import load_config
from moesaic.models.decoder import Decoder

LIMITS = Limits(
    max_num_seqs=8, max_num_batched_tokens=24, max_num_queued_reqs=64, max_model_len=256
)
CPU = torch.device("cpu")


class FlakyDispatcher(LocalDispatcher):
    """Real experts that can be taken away: the next ``failures`` layer calls fail, or no step can
    begin at all."""

    failures = 0
    gone = False

    def begin_step(self) -> Step:
        if self.gone:
            raise NotReady("the experts were taken away", code="expert_unavailable")
        return super().begin_step()

    async def dispatch(self, step: Step, layer: int, hidden_states: Tensor) -> Tensor:
        if layer == 1 and self.failures:
            self.failures -= 1
            raise ExpertUnavailable(layer, cause="test")
        return await super().dispatch(step, layer, hidden_states)

    async def reachable(self) -> None:
        if self.gone:
            await asyncio.Event().wait()


class Rig:
    """An engine, its dispatcher, and the events it told."""

    def __init__(self, engine: Engine, dispatcher: FlakyDispatcher, events: list[Event]) -> None:
        self.engine, self.dispatcher, self.events = engine, dispatcher, events

    async def ended(self, *names: str) -> None:
        while not set(names) <= {
            e.key.request_id for e in self.events if isinstance(e, FinishEvent | FailureEvent)
        }:
            await asyncio.sleep(0.001)

    def submit(
        self, name: str, tokens: Sequence[int], work: Generation | Scoring, **more: Any
    ) -> None:
        self.engine.submit(Request(RequestKey(name), tuple(tokens), work, **more))

    def tokens(self, name: str) -> list[int]:
        told = [e for e in self.events if isinstance(e, TokenEvent) and e.key.request_id == name]
        assert [e.index for e in told] == list(range(len(told)))
        return [e.token_id for e in told]

    def last(self, name: str) -> Event:
        return [e for e in self.events if e.key.request_id == name][-1]


@asynccontextmanager
async def rig(tiny_model: Any, num_blocks: int = 64, recovery_s: float = 5.0) -> AsyncIterator[Rig]:
    checkpoint, config = Checkpoint(tiny_model.directory), load_config(tiny_model.directory)
    decoder = Decoder.load(checkpoint, config, torch.float32, CPU)
    dispatcher = FlakyDispatcher(checkpoint, config, torch.float32, CPU)
    events: list[Event] = []
    engine = Engine(decoder, dispatcher, LIMITS, num_blocks, events.extend, recovery_s)
    running = asyncio.create_task(engine.run())
    try:
        yield Rig(engine, dispatcher, events)
        assert engine.load().kv_blocks_used == 0
        assert engine.load().num_running == engine.load().num_waiting == 0
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def prompts(count: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return {
        f"r{i}": torch.randint(2, 160, (length,), generator=generator).tolist()
        for i, length in enumerate(lengths)
    }


async def test_many_requests_at_once_get_the_tokens_each_would_get_alone(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        asked = prompts(12)
        for name, tokens in asked.items():
            r.submit(name, tokens, Generation(max_tokens=10))
        await r.ended(*asked)

        for name, tokens in asked.items():
            assert r.tokens(name) == tiny_model.greedy(tokens, 10)


async def test_preempted_answers_lose_nothing(tiny_model: Any) -> None:
    async with rig(tiny_model, num_blocks=8) as r:
        asked = prompts(5)
        for name, tokens in asked.items():
            r.submit(name, tokens, Generation(max_tokens=30))
        await r.ended(*asked)

        for name, tokens in asked.items():
            assert r.tokens(name) == tiny_model.greedy(tokens, 30)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
async def test_scores_are_the_log_probabilities_of_whole_candidates(
    tiny_model: Any, length: int
) -> None:
    prompt = prompts(40)["r3"][:1] * length
    candidates = (
        (5,),
        (5, 6),
        (5, 6, 7),
        (9, 8, 7, 6, 5, 4, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
        (4, 1),
    )

    async with rig(tiny_model) as r:
        r.submit("busy", prompts(2)["r1"], Generation(max_tokens=20))
        r.submit("score", prompt, Scoring(candidates))
        await r.ended("score", "busy")

        [told] = [e for e in r.events if isinstance(e, ScoreEvent)]
    for candidate, logprob in zip(candidates, told.logprobs, strict=True):
        rows = tiny_model.logits([*prompt, *candidate]).log_softmax(-1)
        expected = sum(float(rows[len(prompt) - 1 + i, token]) for i, token in enumerate(candidate))
        assert logprob == pytest.approx(expected, abs=1e-4)


async def test_more_candidates_than_blocks_are_scored_in_turns(tiny_model: Any) -> None:
    candidates = tuple((a, b) for a in range(2, 12) for b in range(3))

    async with rig(tiny_model, num_blocks=8) as r:
        r.submit("score", list(range(2, 30)), Scoring(candidates))
        await r.ended("score")

        [told] = [e for e in r.events if isinstance(e, ScoreEvent)]
    rows = tiny_model.logits(list(range(2, 30))).log_softmax(-1)
    assert told.logprobs[0] < float(rows[-1, 2])
    assert len(told.logprobs) == 30


async def test_the_stop_token_ends_an_answer_and_is_not_part_of_it(tiny_model: Any) -> None:
    expected = tiny_model.greedy([5, 6, 7], 12)
    stop = expected[4]
    first = expected.index(stop)

    async with rig(tiny_model) as r:
        r.submit("stops", [5, 6, 7], Generation(max_tokens=12, stop_token_ids=frozenset({stop})))
        await r.ended("stops")

        assert r.tokens("stops") == expected[:first]
        finish = r.last("stops")
    assert isinstance(finish, FinishEvent)
    assert (finish.reason, finish.stop_token_id) == ("stop", stop)


async def test_min_tokens_holds_the_stop_token_back(tiny_model: Any) -> None:
    stop = tiny_model.greedy([5, 6, 7], 1)[0]

    async with rig(tiny_model) as r:
        r.submit(
            "g", [5, 6, 7], Generation(max_tokens=5, min_tokens=3, stop_token_ids=frozenset({stop}))
        )
        await r.ended("g")

        assert len(r.tokens("g")) >= 3
        assert stop not in r.tokens("g")


async def test_a_sampled_answer_resumes_elsewhere_with_the_same_tokens(tiny_model: Any) -> None:
    how = Sampling(temperature=1.0, seed=11)

    async with rig(tiny_model) as r:
        r.submit("a", [3, 4], Generation(max_tokens=8, sampling=how))
        r.submit("b", [3, 4], Generation(max_tokens=8, sampling=how))
        r.submit("other seed", [3, 4], Generation(max_tokens=8, sampling=Sampling(1.0, seed=12)))
        await r.ended("a", "b", "other seed")
        sent = r.tokens("a")[:5]
        r.submit("rest", [3, 4, *sent], Generation(max_tokens=3, sampling=how))
        await r.ended("rest")

        assert r.tokens("a") == r.tokens("b") != r.tokens("other seed")
        assert sent + r.tokens("rest") == r.tokens("a")


async def test_a_failed_step_is_run_again_and_nobody_notices(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        asked = prompts(6)
        for name, tokens in asked.items():
            r.submit(name, tokens, Generation(max_tokens=8))
        r.submit("score", [4, 5, 6], Scoring(((7, 8), (9,))))
        while len(r.events) < 10:
            await asyncio.sleep(0)
        r.dispatcher.failures = 5
        await r.ended(*asked, "score")

        for name, tokens in asked.items():
            assert r.tokens(name) == tiny_model.greedy(tokens, 8)


async def test_requests_wait_for_experts_that_come_back(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.dispatcher.gone = True
        r.submit("patient", [4, 5, 6], Generation(max_tokens=3))
        await asyncio.sleep(0.2)
        assert not r.events
        r.dispatcher.gone = False
        await r.ended("patient")

        assert r.tokens("patient") == tiny_model.greedy([4, 5, 6], 3)


async def test_requests_give_up_with_a_typed_error_when_experts_stay_away(tiny_model: Any) -> None:
    async with rig(tiny_model, recovery_s=0.2) as r:
        r.dispatcher.gone = True
        r.submit("waits", [4, 5, 6], Generation(max_tokens=3))
        r.submit("scores", [4, 5, 6], Scoring(((1,),)))
        await r.ended("waits", "scores")

        failure = r.last("waits")
    assert isinstance(failure, FailureEvent)
    assert isinstance(failure.error, ExpertUnavailable)
    assert failure.error.retryable


async def test_a_deadline_ends_a_request_even_while_experts_are_away(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.dispatcher.gone = True
        r.submit(
            "late", [4], Generation(max_tokens=3), deadline_s=time.monotonic() + 0.1, budget_ms=100
        )
        await r.ended("late")

        failure = r.last("late")
    assert isinstance(failure, FailureEvent)
    assert isinstance(failure.error, DeadlineExceeded)


async def test_a_cancelled_request_tells_nothing_more(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("unwanted", [4, 5], Generation(max_tokens=200))
        r.submit("wanted", [4, 5], Generation(max_tokens=20))
        while not r.events:
            await asyncio.sleep(0)
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
            r.submit(name, [4, 5, 6], Generation(max_tokens=8))
        everything = r.engine.batcher.everything
        while not all(work.stalled_since_s for work in everything()):
            await asyncio.sleep(0.001)
        r.dispatcher.gone = False
        while not r.events:
            await asyncio.sleep(0)

        assert r.engine.batcher.waiting
        assert not any(work.stalled_since_s for work in everything())
        await r.ended(*names)


async def test_an_answer_that_cannot_be_picked_fails_its_step_and_not_the_engine(
    tiny_model: Any,
) -> None:
    stop = tiny_model.greedy([5, 6, 7], 1)[0]
    impossible = Generation(max_tokens=5, min_tokens=3, stop_token_ids=frozenset({stop, 10**9}))

    async with rig(tiny_model) as r:
        r.submit("first", [4, 5, 6], Generation(max_tokens=1))
        r.submit("impossible", [5, 6, 7], impossible)
        await r.ended("first", "impossible")
        r.submit("later", [4, 5, 6], Generation(max_tokens=3))
        await r.ended("later")

        assert r.tokens("first") == tiny_model.greedy([4, 5, 6], 1)
        assert isinstance(r.last("first"), FinishEvent)
        assert isinstance(r.last("impossible"), FailureEvent)
        assert r.tokens("later") == tiny_model.greedy([4, 5, 6], 3)
