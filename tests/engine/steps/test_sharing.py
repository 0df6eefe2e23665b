"""Steps of several tenants: nobody's many answers make those of others slow, and light tenants have steps alone."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.pace import MANY_ANSWERS
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sharing import TARGETS_SAVED, TIMES_THE_FEWEST, LightSteps
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


TARGET_S = 0.25


class Machine:
    """A batcher whose steps take a time of their own and a time for each row."""

    def __init__(self, alone_s: float, row_s: float) -> None:
        self.batcher = Batcher(MANY_PLACES, 10_000, step_target_s=TARGET_S)
        self.alone_s, self.row_s = alone_s, row_s
        self.now_s = 0.0
        self.asked = 0
        for num_rows in (64, 128, 256):
            self.batcher.pace.took(num_rows, alone_s + num_rows * row_s)

    def ask(self, tenant: str, answer: int, *, prompt: int = 2, priority: int = 0) -> RequestKey:
        self.asked += 1
        key = RequestKey(f"{tenant}-{self.asked}")
        tokens = tuple((self.asked + n) % 1000 for n in range(prompt))
        task = GenerationTask(max_tokens=answer)
        self.batcher.submit(Request(key, tokens, task, tenant=tenant, priority=priority))
        return key

    def step(self) -> tuple[PlannedStep, list[RequestKey]]:
        plan = self.batcher.plan()
        took_s = self.alone_s + self.row_s * sum(len(chunk.token_ids) for chunk in plan.chunks)
        self.now_s += took_s
        self.batcher.took(plan, took_s)
        return plan, advance(self.batcher, plan)

    def seconds_of(self, key: RequestKey) -> float:
        """How long the request takes from now on."""
        begun_s = self.now_s
        while key not in self.step()[1]:
            pass
        return self.now_s - begun_s


def flooded(alone_s: float = 0.004, row_s: float = 0.001) -> Machine:
    machine = Machine(alone_s, row_s)
    for _ in range(400):
        machine.ask("heavy", 200, prompt=30)
    for _ in range(20):
        machine.step()
    return machine


def tenants(plan: PlannedStep) -> set[str]:
    return {chunk.sequence.claim.tenant for chunk in plan.chunks}


def test_a_short_request_beside_a_flood_takes_less_than_twice_as_long() -> None:
    alone, beside = Machine(0.004, 0.001), flooded()

    assert beside.seconds_of(beside.ask("light", 24)) < 2 * alone.seconds_of(alone.ask("light", 24))


def test_one_who_always_asks_has_half_the_time_and_others_the_rest() -> None:
    machine = flooded()
    machine.ask("light", 3000)
    spent: Counter[bool] = Counter()
    for _ in range(1000):
        before_s = machine.now_s
        plan, _ = machine.step()
        spent[plan.is_light] += machine.now_s - before_s
        assert tenants(plan) == ({"light"} if plan.is_light else {"light", "heavy"})

    assert spent[True] / spent.total() == pytest.approx(0.5, abs=0.02 + TARGETS_SAVED * 0.05)


def test_where_rows_cost_little_everyone_runs_together() -> None:
    machine = flooded(alone_s=0.02, row_s=1e-5)
    machine.ask("light", 500)

    plans = [machine.step()[0] for _ in range(400)]

    assert sum(plan.is_light for plan in plans) <= 16, "they were tried, and gained nothing"
    assert all("heavy" in tenants(plan) for plan in plans if not plan.is_light)


def test_after_a_time_they_are_tried_again() -> None:
    steps = LightSteps(TARGET_S)
    steps.took(0.1, is_light=False, has_prompts=True)
    steps.took(0.09, is_light=True, has_prompts=False)
    assert not steps.is_due

    for _ in range(60):
        steps.took(0.1, is_light=False, has_prompts=True)

    assert steps.is_due


@pytest.mark.parametrize(
    "others",
    [
        [],
        [("other", 1, 0)],
        [("other", 7, 0)],
        [("urgent", 120, 0)],
    ],
    ids=["alone", "another who wants as little", "who could be done with in a step", "behind all"],
)
def test_nobody_goes_alone_who_has_no_right_to(others: list[tuple[str, int, int]]) -> None:
    machine = Machine(0.004, 0.001)
    machine.batcher.took(PlannedStep(), TARGET_S)  # there is time for light steps
    machine.ask("one", 100, priority=5 if others and others[0][0] == "urgent" else 0)
    for tenant, count, priority in others:
        for _ in range(count):
            machine.ask(tenant, 100, priority=priority)

    assert not any(machine.step()[0].is_light for _ in range(50))


def test_one_answer_goes_alone_beside_many_that_have_begun() -> None:
    machine = Machine(0.004, 0.001)
    for _ in range(60):
        machine.ask("many", 2000)
    for _ in range(5):
        machine.step()
    one = machine.ask("one", 40)

    took_s = machine.seconds_of(one)

    together_s = 40 * (machine.alone_s + 61 * machine.row_s)
    assert took_s < 0.5 * together_s


def test_those_who_put_themselves_behind_everyone_do_not_share_a_light_step() -> None:
    machine = flooded()
    machine.ask("behind", 100, priority=9)
    machine.ask("light", 100)

    plans = [machine.step()[0] for _ in range(50)]

    assert any(plan.is_light for plan in plans)
    assert all(tenants(plan) == {"light"} for plan in plans if plan.is_light)


@given(
    st.lists(
        st.tuples(st.booleans(), st.floats(0.001, 1.0), st.booleans()), min_size=1, max_size=60
    ),
    st.floats(0.01, 1.0),
)
def test_light_steps_never_had_more_time_than_others_and_the_last_step(
    history: list[tuple[bool, float, bool]], target_s: float
) -> None:
    steps, spent_s, longest_s = LightSteps(target_s), {True: 0.0, False: 0.0}, 0.0
    for wants, seconds, has_prompts in history:
        is_light = wants and steps.is_due
        steps.took(seconds, is_light=is_light, has_prompts=has_prompts)
        spent_s[is_light] += seconds
        longest_s = max(longest_s, seconds)
        assert spent_s[True] <= spent_s[False] + longest_s + 1e-9


def test_without_a_target_there_are_none() -> None:
    steps = LightSteps(0.0)
    for _ in range(5):
        steps.took(1.0, is_light=False, has_prompts=True)

    assert not steps.is_due
