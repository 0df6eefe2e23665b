"""Scoring that stores no KV: the same numbers, nothing in the pool, and nobody waits for its end."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.parity.cases import VOCAB_SIZE
from moesaic.dispatch.contract import Step
from moesaic.engine.sequences.requests import (
    FailureEvent,
    FinishEvent,
    GenerationTask,
    ProgressEvent,
    Request,
    RequestKey,
    ScoreEvent,
    ScoringTask,
)
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.sweeps import Slice
from moesaic.errors import DeadlineExceeded, InvalidInput
from moesaic.prefix.blocks import BLOCK_SIZE
from moesaic.prefix.flops import AttentionFlops, ModelFlops
from tests.engine.rig import LIMITS, FlakyDispatcher, rig
from tests.engine.steps.steps import calls_of

NUM_LAYERS = 3  # of the tiny model
FREE = ScoringTask(((5,),), store_kv=False)


def tokens_of(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    candidates=st.lists(
        st.lists(st.integers(2, 90), min_size=1, max_size=9), min_size=1, max_size=4
    ),
    rows=st.integers(9, 60),
)
async def test_scores_have_the_bits_of_the_stored_path_however_layers_are_cut(
    model: Any, lengths: list[int], candidates: list[list[int]], rows: int
) -> None:
    limits = replace(LIMITS, max_num_batched_tokens=rows, sweep_blocks=64)
    asked = {str(i): tokens_of(i, length) for i, length in enumerate(lengths)}
    labels = tuple(map(tuple, candidates))

    async with rig(model, limits=limits, num_blocks=128) as r:
        for name, tokens in asked.items():
            r.submit(f"stored {name}", tokens, ScoringTask(labels))
            r.submit(f"free {name}", tokens, ScoringTask(labels, store_kv=False))
        await r.ended(*(f"{way} {name}" for name in asked for way in ("stored", "free")))

        for name in asked:
            assert r.scores(f"free {name}") == r.scores(f"stored {name}")


async def test_nothing_is_taken_from_the_pool_looked_for_or_left_in_it(tiny_model: Any) -> None:
    prompt = tokens_of(1, 100)
    async with rig(tiny_model, num_blocks=2) as r:  # too few for the prompt
        r.submit("free", prompt, FREE)
        used = 0
        while not r.events:
            used = max(used, r.engine.load().kv_blocks_used)
            await asyncio.sleep(0)
        await r.ended("free")

        assert used == 0
        assert not r.engine.batcher.pool.published
        assert r.cached("free") == 0
        finish = r.last("free")
        assert isinstance(finish, FinishEvent)
        assert (finish.prompt_tokens, finish.epochs) == (100, ((0, 1),))


async def test_the_deployment_says_what_requests_leave_open(tiny_model: Any) -> None:
    limits = replace(LIMITS, store_scoring_kv=False)
    prompt = tokens_of(1, 40)
    async with rig(tiny_model, limits=limits) as r:
        r.submit("as deployed", prompt, ScoringTask(((5,),)))
        await r.ended("as deployed")
        assert not r.engine.batcher.pool.published
        r.submit("stored", prompt, ScoringTask(((5,),), store_kv=True))
        await r.ended("stored")

        assert len(r.engine.batcher.pool.published) == 2
        assert r.scores("stored") == r.scores("as deployed")


async def test_layers_are_computed_one_after_the_other_in_parts(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:  # 24 rows at a time
        r.submit("free", tokens_of(1, 60), FREE)
        await r.ended("free")

        last = NUM_LAYERS - 1
        parts = [(layer, n) for layer in range(last) for n in (24, 24, 12)]
        assert r.dispatcher.asked == [*parts, *[(last, 1)] * 3]  # one at least, wanted or not


async def test_an_answer_goes_on_between_the_parts_of_a_layer(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("answer", [4, 5, 6], GenerationTask(max_tokens=60))
        await r.until(lambda: r.events)
        del r.dispatcher.asked[:]
        r.submit("free", tokens_of(1, 240), FREE)
        await r.ended("answer", "free")

        assert r.tokens("answer") == tiny_model.greedy([4, 5, 6], 60)
    order = [rows for _, rows in r.dispatcher.asked]
    first, last = order.index(24), len(order) - order[::-1].index(24)
    # Ten parts a layer, and one step of the answer, which is a row in each layer, between any two.
    of_a_layer = ([24] + [1] * NUM_LAYERS) * 10
    of_the_last = ([1] + [1] * NUM_LAYERS) * 10  # a part has one row there, wanted or not
    assert order[first:last] == (of_a_layer * (NUM_LAYERS - 1))[:-NUM_LAYERS]
    assert order[last : last + NUM_LAYERS + len(of_the_last)] == [1] * NUM_LAYERS + of_the_last


async def test_a_cancelled_sweep_ends_within_its_layer(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("unwanted", tokens_of(1, 240), FREE)
        while len(r.dispatcher.asked) < 3:  # of ten parts of the first layer
            await asyncio.sleep(0)
        r.engine.cancel(RequestKey("unwanted"))
        assert r.engine.batcher.sweeps.area.num_used == 0
        r.submit("wanted", tokens_of(2, 240), FREE)
        await r.ended("wanted")

        told = [e for e in r.events if e.key.request_id == "unwanted"]
        assert all(isinstance(e, ProgressEvent) for e in told)
        assert len(r.dispatcher.asked) <= 4 + 10 * NUM_LAYERS


async def test_who_shares_a_sweep_with_a_cancelled_request_is_scored(tiny_model: Any) -> None:
    prompts = {str(i): tokens_of(i, 8) for i in range(3)}
    async with rig(tiny_model) as r:
        for name, tokens in prompts.items():
            r.submit(name, tokens, FREE)
        while not r.dispatcher.asked:
            await asyncio.sleep(0)
        r.engine.cancel(RequestKey("1"))
        await r.ended("0", "2")

        assert r.dispatcher.asked == [(0, 24), (1, 16), (2, 2)]
        for name in ("0", "2"):
            rows = tiny_model.logits(prompts[name]).log_softmax(-1)
            assert r.scores(name) == pytest.approx([float(rows[-1, 5])], abs=1e-4)


async def test_a_prompt_of_many_slices_tells_how_far_it_is(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("long", tokens_of(1, 240), FREE)
        r.submit("short", tokens_of(2, 20), FREE)
        await r.ended("long", "short")

        told = [
            (e.key.request_id, e.computed_tokens) for e in r.events if isinstance(e, ProgressEvent)
        ]
    assert {name for name, _ in told} == {"long"}
    counts = [count for _, count in told]
    assert len(counts) == 9  # as often as there is as much as a largest step behind it
    assert counts == sorted(counts)
    assert all(0 < count < 240 for count in counts)


def test_slices_of_a_slow_engine_become_smaller_and_grow_again() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=200, sweep_blocks=100, max_model_len=2000)
    batcher = Batcher(limits, num_blocks=2, num_layers=40)
    batcher.submit(Request(RequestKey("long"), (1,) * 1000, FREE))

    def step(rows_per_s: float) -> int:
        piece = batcher.schedule()
        assert isinstance(piece, Slice)
        batcher.sweeps.advance(piece, piece.num_rows / rows_per_s)
        return piece.num_rows

    slow = [step(100) for _ in range(12)]
    hiccup = [step(100) if i != 5 else step(1) for i in range(10)]
    fast = [step(1e6) for _ in range(8)]

    assert slow[:5] == [200] * 4 + [50]  # after a few of them it is known how long they take
    assert set(slow[6:]) == {50}
    assert set(hiccup) == {50}
    assert fast[4:] == [200] * 4


def test_rows_far_behind_in_a_prompt_come_in_smaller_slices() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=64, sweep_blocks=400, max_model_len=9000)
    attention_alone = ModelFlops([AttentionFlops(1, 1)] * 2, 0, 0)
    batcher = Batcher(limits, 2, None, 2, attention_alone)
    batcher.submit(Request(RequestKey("long"), (1,) * 6000, FREE))

    rows = []
    while sum(rows) < 6000:
        piece = batcher.schedule()
        assert isinstance(piece, Slice)
        assert piece.flops <= 2 * attention_alone.span(0, 64) or piece.num_rows <= BLOCK_SIZE
        batcher.sweeps.advance(piece)
        rows.append(piece.num_rows)

    assert rows[0] == 64
    assert rows == sorted(rows, reverse=True)
    assert rows[-2] == BLOCK_SIZE  # at least, though that is more than a step of a beginning


async def test_a_deadline_ends_a_sweep_while_experts_are_away(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.dispatcher.gone = True
        how = {"deadline_s": time.monotonic() + 0.1, "budget_ms": 100}
        r.submit("late", tokens_of(1, 50), FREE, **how)
        await r.ended("late")

        failure = r.last("late")
    assert isinstance(failure, FailureEvent)
    assert isinstance(failure.error, DeadlineExceeded)


async def test_a_part_that_failed_is_computed_again(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("undisturbed", tokens_of(1, 60), FREE)
        await r.ended("undisturbed")
        r.submit("free", tokens_of(1, 60), FREE)
        await asyncio.sleep(0)
        r.dispatcher.failures = 4
        await r.ended("free")

        assert r.dispatcher.failures == 0
        assert r.scores("free") == r.scores("undisturbed")


async def test_a_sweep_goes_on_when_the_placement_changes_between_layers(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin_step(self: FlakyDispatcher) -> Step:  # a new placement after three parts
        return replace(self._step, epoch=1 if len(self.asked) < 3 else 2)

    monkeypatch.setattr(FlakyDispatcher, "begin_step", begin_step)
    async with rig(tiny_model) as r:
        r.submit("free", tokens_of(1, 60), FREE)
        await r.ended("free")

        finish = r.last("free")
    assert isinstance(finish, FinishEvent)
    assert finish.epochs == ((1, 0), (2, 1))


async def test_a_short_prompt_does_not_wait_for_the_end_of_a_long_one(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        r.submit("long", tokens_of(1, 240), FREE)
        r.submit("short", tokens_of(2, 10), FREE)
        r.submit("stored", tokens_of(3, 100), ScoringTask(((5,),)))
        await r.ended("long", "short", "stored")

        order = [e.key.request_id for e in r.events if isinstance(e, ScoreEvent)]
    assert order == ["short", "stored", "long"]


async def test_sweeps_are_not_kept_from_running_by_a_crowd_of_others(tiny_model: Any) -> None:
    async with rig(tiny_model) as r:
        for i in range(30):
            r.submit(str(i), tokens_of(i, 90), ScoringTask(((5,),)))
        r.submit("free", tokens_of(99, 90), FREE)
        await r.ended("free")

        told = {e.key.request_id for e in r.events if isinstance(e, ScoreEvent)}
        assert len(told) < 15
        await r.ended(*map(str, range(30)))


def test_the_longest_prompt_that_fits_is_taken_and_one_more_token_refused() -> None:
    limits = replace(LIMITS, sweep_blocks=5)
    batcher = Batcher(limits, num_blocks=2, num_layers=NUM_LAYERS)
    batcher.submit(Request(RequestKey("fits"), (1,) * 5 * BLOCK_SIZE, FREE))

    with pytest.raises(InvalidInput) as refused:
        batcher.submit(Request(RequestKey("too long"), (1,) * (5 * BLOCK_SIZE + 1), FREE))

    assert refused.value.field == "prompt"
    assert refused.value.code == "context_length_exceeded"
    assert "room for 96 tokens without stored KV, but there is room for 80" in refused.value.fix
    assert "--sweep-bytes" in refused.value.fix


def test_without_an_area_it_is_refused() -> None:
    batcher = Batcher(replace(LIMITS, sweep_blocks=0), num_blocks=64)

    with pytest.raises(InvalidInput, match="--sweep-bytes"):
        batcher.submit(Request(RequestKey("free"), (1, 2), FREE))


def test_a_long_prompt_is_not_overtaken_for_ever_by_short_ones() -> None:
    batcher = Batcher(replace(LIMITS, sweep_blocks=15), num_blocks=2, num_layers=1)
    batcher.submit(Request(RequestKey("first"), (1,) * 20, FREE))
    batcher.submit(Request(RequestKey("long"), (1,) * 15 * BLOCK_SIZE, FREE))
    batcher.submit(Request(RequestKey("short"), (1,) * 20, FREE))

    order = []
    while batcher.unfinished():
        piece = batcher.schedule()
        if isinstance(piece, Slice) and batcher.sweeps.advance(piece):
            for sequence in piece.sequences:
                order.append(sequence.request.key.request_id)
                batcher.finish(sequence)

    assert order == ["first", "long", "short"]


def test_to_join_a_sweep_takes_no_longer_for_those_that_wait() -> None:
    calls = {}
    for num in (500, 1000):
        limits = replace(LIMITS, max_num_batched_tokens=2048, sweep_blocks=4096)
        limits = replace(limits, max_num_queued_reqs=num, max_num_queued_tokens=10**6)
        batcher = Batcher(limits, num_blocks=2, num_layers=NUM_LAYERS)
        for i in range(num):
            batcher.submit(Request(RequestKey(f"{i}"), (i,) * 20, FREE, tenant=f"{i % 2}"))
        batcher.sweeps.others_had([])
        calls[num] = calls_of(batcher.schedule)
        assert len(batcher.sweeps.running) < 250

    assert calls[1000] < calls[500] + 20 * 500


def test_exact_prompts_among_others_share_sweeps_with_one_another() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=2048, sweep_blocks=4096)
    batcher = Batcher(limits, num_blocks=2, num_layers=NUM_LAYERS)
    for i in range(20):
        key, least = RequestKey(f"{i}"), float(i % 2)
        batcher.submit(Request(key, (i,) * 20, FREE, min_threshold=least))

    sizes, least = [], []
    while batcher.unfinished():
        piece = batcher.schedule()
        if isinstance(piece, Slice) and batcher.sweeps.advance(piece):
            sizes.append(len(piece.sequences))
            least.append({sequence.request.min_threshold for sequence in piece.sequences})
            for sequence in piece.sequences:
                batcher.finish(sequence)

    assert sizes == [10, 10]
    assert least == [{0.0}, {1.0}]
