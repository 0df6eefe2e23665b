"""Answers of several tenants in one step: nobody's many answers make those of others slow."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.pace import MANY_ANSWERS
from moesaic.engine.steps.step_sharing import TIMES_THE_FEWEST
from tests.engine.steps.steps import MANY_PLACES, advance

LEAST_ANSWERS = MANY_ANSWERS.least_rows  # as many as go on where rows take long


def answering(*parties: tuple[str, int, int], row_s: float = 1 / 256) -> Batcher:
    """A batcher where each tenant, with so many answers of a priority, has begun them all."""
    batcher = Batcher(MANY_PLACES, 10_000, step_target_s=0.25)
    for num_rows in (128, 256, 512):
        batcher.pace.took(num_rows, num_rows * row_s)
    for tenant, count, priority in parties:
        for number in range(count):
            key = RequestKey(f"{tenant}-{priority}-{number}")
            asked = GenerationTask(max_tokens=4000)
            batcher.submit(Request(key, (1, 2), asked, tenant=tenant, priority=priority))
    while batcher.num_waiting or not all(sequence.decodes for sequence in batcher.running):
        advance(batcher, batcher.plan())
    return batcher


def tokens_of(batcher: Batcher, steps: int) -> list[Counter[str]]:
    """Tokens by tenant, in each of the next steps."""
    found = []
    for _ in range(steps):
        plan = batcher.plan()
        found.append(Counter(chunk.sequence.claim.tenant for chunk in plan.chunks))
        advance(batcher, plan)
    return found


def test_beside_one_answer_of_another_tenant_many_take_turns() -> None:
    batcher = answering(("many", 63, 0), ("one", 1, 0))
    lengths = [len(sequence.tokens) for sequence in batcher.running]

    assert tokens_of(batcher, 8) == [{"many": LEAST_ANSWERS, "one": 1}] * 8
    grown = [
        len(sequence.tokens) - before
        for sequence, before in zip(batcher.running, lengths, strict=True)
        if sequence.claim.tenant == "many"
    ]
    assert sum(grown) == 8 * LEAST_ANSWERS
    assert max(grown) - min(grown) <= 1


@pytest.mark.parametrize(
    "parties",
    [
        [("one", 100, 0)],
        [("one", 90, 0), ("one", 2, -1), ("one", 2, 5)],
        [("one", 80, 0), ("other", 80 // TIMES_THE_FEWEST, 0)],
        [("one", 80, 0), ("behind", 1, 1000)],
    ],
    ids=["alone", "one tenant's priorities", "about as many", "beside what is behind everyone"],
)
def test_all_answers_go_on_where_nobody_needs_the_time(parties: list[tuple[str, int, int]]) -> None:
    batcher = answering(*parties)

    num_first = parties[0][1]
    assert all(step[parties[0][0]] >= num_first for step in tokens_of(batcher, 4))


def test_what_is_behind_everyone_takes_turns_beside_others() -> None:
    batcher = answering(("one", 1, 0), ("behind", 80, 1000))

    assert tokens_of(batcher, 3) == [{"behind": LEAST_ANSWERS, "one": 1}] * 3


def test_many_answers_go_on_where_rows_take_no_time() -> None:
    batcher = answering(("many", 63, 0), ("one", 1, 0), row_s=1e-5)

    assert tokens_of(batcher, 2) == [{"many": 63, "one": 1}] * 2


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4))
def test_everyone_goes_on_and_whoever_has_few_answers_in_every_step(counts: list[int]) -> None:
    parties = [(str(number), count, 0) for number, count in enumerate(counts) if count]
    if not parties or sum(counts) > MANY_PLACES.max_num_seqs:
        return
    batcher = answering(*parties)
    lengths = {id(sequence): len(sequence.tokens) for sequence in batcher.running}

    steps = tokens_of(batcher, 4)

    for tenant, count, _ in parties:
        most = max(LEAST_ANSWERS, TIMES_THE_FEWEST * min(n for _, n, _ in parties))
        assert all(step[tenant] == min(count, most) for step in steps)
    assert all(len(sequence.tokens) > lengths[id(sequence)] for sequence in batcher.running)


@pytest.mark.parametrize(("answers", "rows"), [(1, 24), (LEAST_ANSWERS, 16), (60, 77)])
def test_prompts_are_short_beside_anothers_answers_unless_these_take_turns(
    answers: int, rows: int
) -> None:
    batcher = answering(("answers", answers, 0), row_s=1 / 1024)
    prompt = tuple(range(900))
    asked = GenerationTask(max_tokens=4)
    batcher.submit(Request(RequestKey("long"), prompt, asked, tenant="prompts"))
    batcher.schedule()  # the prompt begins to run

    assert batcher.schedule().prompt_rows == pytest.approx(rows, abs=2)


def test_each_tenants_prompts_have_what_they_may_beside_the_others_answers() -> None:
    """One has an answer and a prompt: its own prompt may make its answer wait, another's may not."""
    batcher = answering(("both", 1, 0), row_s=1 / 1024)
    for number, tenant in enumerate(("both", "prompts") * 2):
        prompt = tuple(range(number, 900))
        asked = GenerationTask(max_tokens=4)
        batcher.submit(Request(RequestKey(f"{number}"), prompt, asked, tenant=tenant))
    rows: list[Counter[str]] = []
    for _ in range(4):
        plan = batcher.plan()
        rows.append(Counter())
        for chunk in plan.chunks:
            if not chunk.sequence.decodes:
                rows[-1][chunk.sequence.claim.tenant] += len(chunk.token_ids)
        advance(batcher, plan)

    assert all(step["prompts"] <= 24 for step in rows)
    assert any(step["both"] >= 190 for step in rows)
    assert all(step.total() <= 270 for step in rows)
