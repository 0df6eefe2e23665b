"""Rows of a step by machines of any speed, whose steps take a time of their own and one for each row; costs of rows."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey, ScoringTask
from moesaic.engine.sequences.sequence import Chunk, sequence_of
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.pace import (
    BESIDE_ANSWERS,
    BESIDE_OTHERS,
    FIRST_ROWS,
    GROWTH,
    IN_TURN,
    LEAST_ROWS,
    RowCosts,
    StepPace,
)
from moesaic.prefix.flops import AttentionFlops, ModelFlops
from tests.engine.steps.steps import MANY_PLACES, advance

MOST_ROWS = 2048


def run(pace: StepPace, alone_s: float, row_s: float, steps: int = 12) -> list[int]:
    """Rows of each of the next steps, which have all they may."""
    rows = []
    for _ in range(steps):
        rows.append(pace.rows())
        pace.took(rows[-1], alone_s + row_s * rows[-1])
    return rows


@given(row_s=st.floats(1e-6, 0.03), alone_s=st.floats(0, 0.3), hiccup_s=st.sampled_from([0.0, 5.0]))
def test_no_step_takes_much_longer_than_it_should(
    row_s: float, alone_s: float, hiccup_s: float
) -> None:
    pace = StepPace(1.0, MOST_ROWS)
    run(pace, alone_s + hiccup_s, row_s, steps=1)

    rows = run(pace, alone_s, row_s, steps=60)

    few = 3 * LEAST_ROWS  # so many are tried even where they take longer
    assert all(alone_s + row_s * count <= 1.5 for count in rows[20:] if count > few)
    reached = max(rows[-8:])
    fits = (1.0 - alone_s) / row_s
    assert reached >= min(MOST_ROWS, max(LEAST_ROWS, 0.5 * fits)), "it stays slower than it must"


def test_a_fast_machine_has_full_steps_after_a_few() -> None:
    rows = run(StepPace(1.0, MOST_ROWS), 0.005, 0.0002)

    assert rows[:3] == [FIRST_ROWS, FIRST_ROWS * GROWTH, FIRST_ROWS * GROWTH**2]
    assert set(rows[4:]) == {MOST_ROWS}


def test_a_step_that_takes_long_by_itself_is_not_cut_to_pieces() -> None:
    """Reading the weights takes three seconds: sixteen rows at a time would take for ever."""
    pace = StepPace(1.0, MOST_ROWS)

    rows = run(pace, 3.0, 0.01, steps=40)

    assert sum(rows[-10:]) / sum(3.0 + 0.01 * count for count in rows[-10:]) > 0.4 / 0.01
    assert max(rows[-10:]) <= 2 * 3.0 / 0.01
    assert pace.rows(BESIDE_ANSWERS) <= 3.0 / 0.01


def test_a_slow_first_step_of_few_rows_is_not_held_against_all_others() -> None:
    pace = StepPace(1.0, MOST_ROWS)
    for _ in range(3):
        pace.took(16, 3.0)

    assert max(run(pace, 1.2, 0.015, steps=20)[-8:]) >= 0.9 * 1.2 / 0.015


def test_steps_that_failed_have_fewer_rows_until_one_succeeds() -> None:
    pace = StepPace(1.0, MOST_ROWS)
    before = run(pace, 0.0, 0.0001)[-1]
    for _ in range(20):
        pace.failed(pace.rows())

    assert (before, pace.rows()) == (MOST_ROWS, LEAST_ROWS)
    assert run(pace, 0.0, 0.0001, steps=6)[-1] == MOST_ROWS


def test_beside_another_tenants_answers_a_step_is_shorter() -> None:
    pace = StepPace(1.0, MOST_ROWS)
    for rows in (100, 200, 400):
        pace.took(rows, rows * 0.001)

    assert pace.rows() == pytest.approx(1000, rel=0.01)
    assert pace.rows(BESIDE_ANSWERS) == pytest.approx(1000, rel=0.01)
    assert pace.rows(BESIDE_OTHERS) == pytest.approx(100, rel=0.01)


def test_rows_that_take_unlike_times_do_not_pass_for_a_steps_own_time() -> None:
    """Fewer, slower rows: a line through both would say that rows cost nothing, and allow the most."""
    pace = StepPace(0.25, 100 * MOST_ROWS)
    for _ in range(20):
        pace.took(0, 0.002, answer_rows=1)
        pace.took(1200, 0.14)
        pace.took(1000, 0.2)

    assert 0.2 <= pace.rows() * 0.2 / 1000 <= 0.35


def test_where_tenants_take_turns_a_step_is_shorter_but_not_cut_to_pieces() -> None:
    fast, slow = StepPace(1.0, MOST_ROWS), StepPace(1.0, MOST_ROWS)
    for rows in (100, 200, 400):
        fast.took(rows, rows * 0.001)
        slow.took(rows, 3.0 + rows * 0.01)

    assert fast.rows(IN_TURN) == pytest.approx(400, rel=0.01)
    assert slow.rows(IN_TURN) == pytest.approx(300, rel=0.01)


def test_without_a_target_a_step_has_all_it_may() -> None:
    assert run(StepPace(0.0, MOST_ROWS), 100.0, 1.0, steps=3) == [MOST_ROWS] * 3


FLOPS = ModelFlops([AttentionFlops(per_token=500, per_pair=1)] * 2, 998, head=1000)
# A row costs 1 at the beginning, 2 behind a thousand keys, 1 / 2 more with logits.
COSTS = RowCosts(FLOPS)
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
