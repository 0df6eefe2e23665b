"""Costs of rows: what FLOPs they take, and what steps and tenants make of that."""

from collections import Counter
from dataclasses import replace

import pytest

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey, ScoringTask
from moesaic.engine.sequences.sequence import Chunk, sequence_of
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.row_costs import RowCosts
from moesaic.prefix.flops import AttentionFlops, ModelFlops
from tests.engine.steps.steps import MANY_PLACES, advance

FLOPS = ModelFlops([AttentionFlops(per_token=500, per_pair=1)] * 2, 998, head=1000)
COSTS = RowCosts(
    FLOPS
)  # a row costs 1 at the beginning, 2 behind a thousand keys, 1 / 2 more with logits
LIMITS = replace(MANY_PLACES, max_num_batched_tokens=2048)
SCORED = ScoringTask(candidates=tuple((n, n, n, n) for n in range(300)))


def batcher(row_s: float = 0.001) -> Batcher:
    """A batcher that knows what rows take; steps should take a quarter of a second."""
    made = Batcher(LIMITS, 10_000, flops=FLOPS, step_target_s=0.25)
    for cost in (64, 128, 256):
        made.pace.took(cost, cost * row_s)
    return made


def ask(target: Batcher, task: GenerationTask | ScoringTask, length: int, tenant: str) -> None:
    key = RequestKey(f"{tenant}-{len(target.unfinished())}")
    target.submit(Request(key, tuple(range(length)), task, tenant=tenant))


def test_a_row_costs_more_the_more_keys_it_sees_and_with_logits() -> None:
    assert COSTS.at(0, False) == 1
    assert COSTS.at(1000, False) == pytest.approx(2)
    assert COSTS.at(1000, True) == pytest.approx(2.5)


def test_chunks_cost_what_their_rows_do() -> None:
    task = GenerationTask(max_tokens=4)
    sequence = sequence_of(Request(RequestKey("a"), (1,) * 90, task), 0, swept=False)
    chunks = [Chunk(sequence, [1] * 30, 40, [], wanted=2), Chunk(sequence, [1], 500, [], wanted=0)]

    rows = [COSTS.at(40 + n, n >= 28) for n in range(30)]
    assert COSTS.of(chunks) == pytest.approx(sum(rows) + COSTS.at(500, False))


def test_the_next_row_of_a_sequence_is_where_it_stands() -> None:
    scored = sequence_of(Request(RequestKey("s"), (1,) * 1000, SCORED), 0, swept=False)
    assert COSTS.next_row(scored) == 1
    scored.computed = 1000
    assert COSTS.next_row(scored) == COSTS.at(1000, True)


def test_a_step_of_candidates_behind_a_long_prompt_takes_no_longer_than_one_of_a_prompt() -> None:
    target = batcher()
    ask(target, SCORED, 3000, "one")
    taken = []
    while target.unfinished():
        plan = target.plan()
        taken.append(COSTS.of(plan.chunks) * 0.001)
        target.took(plan, taken[-1])
        advance(target, plan)

    assert max(taken) <= 0.4, "a long chunk counts by its first row"
    assert len(taken) > 3000 * 0.001 / 0.25


def test_tenants_take_turns_by_costs_not_by_rows() -> None:
    """Rows behind a long prompt cost several times as much, so their tenant gets fewer of these."""
    target = batcher()
    for _ in range(8):
        ask(target, SCORED, 3000, "scored")
    for _ in range(400):
        ask(target, GenerationTask(max_tokens=1), 100, "short")
    costs: Counter[str] = Counter()
    rows: Counter[str] = Counter()
    for _ in range(150):
        plan = target.plan()
        for chunk in plan.chunks:
            tenant = chunk.sequence.claim.tenant
            costs[tenant] += COSTS.of([chunk])  # type: ignore[assignment]  # counts are floats here
            rows[tenant] += len(chunk.token_ids)
        target.took(plan, COSTS.of(plan.chunks) * 0.001)
        advance(target, plan)
        assert {s.claim.tenant for s in target.unfinished()} == {"scored", "short"}

    assert costs["short"] == pytest.approx(costs["scored"], rel=0.1)
    assert rows["short"] > 1.5 * rows["scored"]
