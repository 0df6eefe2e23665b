"""Steps of light tenants alone: who is light, how much time these steps have, and that others get theirs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.light_steps import TARGETS_SAVED, LightSteps
from moesaic.engine.steps.planned_step import PlannedStep
from tests.engine.steps.steps import MANY_PLACES, advance

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
