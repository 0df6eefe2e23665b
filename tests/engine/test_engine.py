"""The engine on a real decoder: what it answers is what a plain forward pass answers, whatever
happens around it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.blocks import BLOCK_SIZE
from moesaic.engine.engine import Engine
from moesaic.engine.limits import Limits
from moesaic.engine.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    Generation,
    PromptEvent,
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
from moesaic.prefix.block_hashes import BlockHasher

LIMITS = Limits(
    max_num_seqs=8,
    max_num_batched_tokens=24,
    max_num_queued_reqs=64,
    max_num_queued_tokens=4096,
    max_model_len=256,
)
CPU = torch.device("cpu")
HASHER = BlockHasher(b"secret", "tiny", BLOCK_SIZE)


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

    def cached(self, name: str) -> int:
        finish = self.last(name)
        assert isinstance(finish, FinishEvent)
        return finish.cached_tokens

    def last(self, name: str) -> Event:
        return [e for e in self.events if e.key.request_id == name][-1]


@asynccontextmanager
async def rig(
    tiny_model: Any,
    num_blocks: int = 64,
    recovery_s: float = 5.0,
    hasher: BlockHasher | None = HASHER,
) -> AsyncIterator[Rig]:
    checkpoint, config = Checkpoint(tiny_model.directory), load_config(tiny_model.directory)
    decoder = Decoder.load(checkpoint, config, torch.float32, CPU)
    dispatcher = FlakyDispatcher(checkpoint, config, torch.float32, CPU)
    events: list[Event] = []
    engine = Engine(decoder, dispatcher, LIMITS, num_blocks, events.extend, recovery_s, hasher)
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
    impossible = Generation(max_tokens=5, sampling=Sampling(logit_bias=((10**9, 1.0),)))

    async with rig(tiny_model) as r:
        r.submit("first", [4, 5, 6], Generation(max_tokens=1))
        r.submit("impossible", [5, 6, 7], impossible)
        await r.ended("first", "impossible")
        r.submit("later", [4, 5, 6], Generation(max_tokens=3))
        await r.ended("later")

        assert isinstance(r.last("first"), FailureEvent)
        assert isinstance(r.last("impossible"), FailureEvent)
        assert r.tokens("later") == tiny_model.greedy([4, 5, 6], 3)


async def test_prompts_that_begin_alike_get_the_tokens_they_get_without_a_cache(
    tiny_model: Any,
) -> None:
    common = torch.randint(2, 160, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    asked = {
        f"{cut}/{end}": [*common[:cut], *ends]
        for cut in (15, 16, 33, 48, 70)
        for end, ends in enumerate(([], [9], [9, 8], [7] * 20))
    }

    async with rig(tiny_model, num_blocks=24) as r:  # too few for all: some are preempted, evicted
        for _ in range(2):
            for name, tokens in asked.items():
                r.submit(name, tokens, Generation(max_tokens=6))
            await r.ended(*asked)
            told = {name: r.tokens(name) for name in asked}
            cached = {name: r.cached(name) for name in asked}
            r.events.clear()

            for name, tokens in asked.items():
                assert told[name] == tiny_model.greedy(tokens, 6)
                assert cached[name] < len(tokens)
                assert cached[name] % BLOCK_SIZE == 0
            assert sum(cached.values()) > 0


@pytest.mark.parametrize("length", [16, 17, 31, 32, 40])
async def test_candidates_behind_a_cached_prompt_score_as_behind_a_fresh_one(
    tiny_model: Any, length: int
) -> None:
    prompt = prompts(40)["r3"][:1] * length
    candidates = ((5,), (5, 6), (9, 8, 7, 6, 5, 4, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12))
    scores = []
    for hasher in (None, HASHER):
        async with rig(tiny_model, hasher=hasher) as r:
            for name in ("first", "again"):
                r.submit(name, prompt, Scoring(candidates))
                await r.ended(name)
            scores += [e.logprobs for e in r.events if isinstance(e, ScoreEvent)]
            cached = [r.cached(name) for name in ("first", "again")]
        assert cached == ([0, (length - 1) // 16 * 16] if hasher else [0, 0])

    for logprobs in scores:
        assert logprobs == pytest.approx(scores[0], abs=1e-5)


async def test_what_the_cache_saved_is_counted(tiny_model: Any) -> None:
    queries, hits = (
        lambda name=name: REGISTRY.get_sample_value(f"moesaic_prefix_cache_{name}_total") or 0
        for name in ("queries", "hits")
    )
    before = queries(), hits()
    async with rig(tiny_model) as r:
        for name in ("first", "again"):
            r.submit(name, [5] * 40, Generation(max_tokens=1))
            await r.ended(name)
        assert r.engine.batcher.pool.num_cached == 2

    assert (queries() - before[0], hits() - before[1]) == (80, 32)


async def test_a_deadline_ends_a_request_between_two_steps(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        now = time.monotonic()
        r.submit("late", [4], Generation(max_tokens=200), deadline_s=now + 0.05, budget_ms=50)
        r.submit("in time", [4], Generation(max_tokens=20))
        await r.ended("late", "in time")

        failure = r.last("late")
    assert isinstance(failure, FailureEvent)
    assert isinstance(failure.error, DeadlineExceeded)
    assert isinstance(r.last("in time"), FinishEvent)


def logprobs_told(r: Rig, name: str) -> dict[int, Any]:
    told: dict[int, Any] = {}
    for event in r.events:
        if isinstance(event, PromptEvent) and event.key.request_id == name:
            for position, logprob in enumerate(event.logprobs, event.first_position):
                assert position not in told
                told[position] = logprob
    return told


@pytest.mark.parametrize("num_blocks", [64, 8])  # 8: prompts are preempted on their way
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_prompt_s_log_probabilities_are_those_of_one_plain_pass(
    tiny_model: Any, num_blocks: int, max_tokens: int
) -> None:
    asked = prompts(6) | {"one token": [7]}
    work = Generation(max_tokens=max_tokens, prompt_logprobs=2)
    async with rig(tiny_model, num_blocks) as r:
        r.submit("fills the cache", asked["r2"], Generation(max_tokens=1))
        await r.ended("fills the cache")
        for name, tokens in asked.items():
            r.submit(name, tokens, work)
        await r.ended(*asked)

        for name, tokens in asked.items():
            told = logprobs_told(r, name)
            expected = tiny_model.logits(tokens).log_softmax(-1)
            assert list(told) == list(range(1, len(tokens)))
            for position, entry in told.items():
                row = expected[position - 1]
                assert entry.logprob == pytest.approx(float(row[tokens[position]]), abs=1e-4)
                assert entry.rank == 1 + int((row > row[tokens[position]]).sum())
                assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
            assert r.tokens(name) == tiny_model.greedy(tokens, 3)[:max_tokens]
            last = r.last(name)
            assert isinstance(last, FinishEvent)
            assert (last.reason, last.completion_tokens) == ("length", max_tokens)


async def test_an_answer_with_penalties_is_the_same_when_it_moves_half_way(
    tiny_model: Any,
) -> None:
    how = Sampling(
        temperature=1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=1.0
    )
    async with rig(tiny_model) as r:
        r.submit("stayed", [5, 6, 7], Generation(max_tokens=20, sampling=how))
        await r.ended("stayed")
        whole = r.tokens("stayed")
        rest = Generation(max_tokens=12, sampling=how, num_resumed=8)
        r.submit("moved", [5, 6, 7, *whole[:8]], rest)
        await r.ended("moved")

        assert r.tokens("moved") == whole[8:]
