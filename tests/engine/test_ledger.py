"""A ledger notes what steps cost, and the requests behind them."""

import math

import pytest

from moesaic.costs import CostBook, RandomChoice, fitted
from moesaic.dispatch.expert_waits import NOTHING, ExpertWaits
from moesaic.engine.computing import Computed
from moesaic.engine.ledger import (
    LATE_LENGTHS,
    MEASURED_STEPS,
    StepLedger,
    StepWork,
)
from moesaic.engine.promises import ChoiceCounts
from moesaic.engine.sequences.requests import (
    FailureEvent,
    FinishEvent,
    GenerationTask,
    Request,
    RequestKey,
    ScoringTask,
    TokenEvent,
)
from moesaic.engine.steps.queues import PlannedStep
from moesaic.errors import MoesaicError, Overloaded
from moesaic.messages.performance import MOST_KEPT, PART_TERMS

CHOICE = RandomChoice(32, 4)
WORK = StepWork(20.0, 8, 1, 10, 36)


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> StepLedger:
    return StepLedger(CHOICE, clock=clock, wall_clock=lambda: 1000.0 + clock.now_s)


def generation(name: str, prompt: int = 8, max_tokens: int = 100) -> Request:
    return Request(RequestKey(name), tuple(range(prompt)), GenerationTask(max_tokens))


def answer(
    ledger: StepLedger, clock: Clock, request: Request, *, tokens: int, gap_s: float
) -> None:
    """Answer a request, a token after each gap."""
    ledger.came(request)
    for index in range(tokens):
        clock.now_s += gap_s
        ledger.told([TokenEvent(request.key, index, 7)])
    ledger.told([FinishEvent(request.key, "length", 8, tokens, ())])


def test_latencies_count_from_the_queue(ledger: StepLedger, clock: Clock) -> None:
    answer(ledger, clock, generation("a"), tokens=5, gap_s=0.25)

    report = ledger.take()

    assert report.ended == 1
    assert report.latencies[0].ttft_s == pytest.approx(0.25)
    assert report.latencies[0].tpot_s == pytest.approx(0.25)
    assert report.window_s == pytest.approx(1.25)


def test_an_answer_of_one_token_has_no_later_ones(ledger: StepLedger, clock: Clock) -> None:
    answer(ledger, clock, generation("a"), tokens=1, gap_s=0.5)

    assert ledger.take().latencies[0].tpot_s == 0.0


def test_what_failed_or_was_refused_has_missed_its_targets(ledger: StepLedger) -> None:
    for name in ("failed", "cancelled"):
        ledger.came(generation(name))
        ledger.told([TokenEvent(RequestKey(name), 0, 7)])
    ledger.told([FailureEvent(RequestKey("failed"), MoesaicError("gone"))])
    ledger.forget(RequestKey("cancelled"))
    ledger.told([FinishEvent(RequestKey("cancelled"), "length", 8, 3, ())])
    ledger.came(generation("refused"))
    ledger.told([FailureEvent(RequestKey("refused"), Overloaded("full"))])

    report = ledger.take()

    assert (report.arrived, report.ended) == (3, 2)
    assert [latency.ttft_s for latency in report.latencies] == [math.inf, math.inf]


def test_an_answer_that_has_begun_is_as_long_as_one_that_ended(
    ledger: StepLedger, clock: Clock
) -> None:
    ledger.came(generation("unknown", max_tokens=500))
    ledger.came(generation("short", max_tokens=3))
    begun = ledger.take().arrivals
    for number in range(2 * LATE_LENGTHS):
        answer(ledger, clock, generation(f"{number}"), tokens=20, gap_s=0.01)
    ledger.take()
    ledger.came(generation("late", max_tokens=500))
    ledger.came(Request(RequestKey("scored"), (1, 2), ScoringTask(((3,),))))

    late = ledger.take().arrivals

    assert [arrival.answer_tokens for arrival in begun] == [0, 3]
    assert [arrival.answer_tokens for arrival in late] == [20, 1]


def test_an_answer_that_its_limit_cut_says_nothing_against_longer_ones(
    ledger: StepLedger,
) -> None:
    for number in range(LATE_LENGTHS):
        tokens = 10 + number % 31  # from 10 to 40
        request = generation(f"{number}", max_tokens=tokens)
        ledger.came(request)
        ledger.told([FinishEvent(request.key, "length", 8, tokens, ())])
    ledger.take()
    for number in range(64):
        ledger.came(generation(f"late {number}", max_tokens=30))
        ledger.came(generation(f"long {number}", max_tokens=500))

    arrivals = ledger.take().arrivals

    assert {each.answer_tokens for each in arrivals[::2]} == {30}
    assert {each.answer_tokens for each in arrivals[1::2]} == {40}


def test_prompts_are_taken_to_be_cached_as_those_before_were(ledger: StepLedger) -> None:
    for number in range(200):
        key = RequestKey(f"{number}")
        ledger.came(generation(f"{number}"))
        ledger.told([FinishEvent(key, "length", 8, 1, (), cached_tokens=6)])
    ledger.take()
    ledger.came(generation("last", prompt=100))

    assert ledger.take().arrivals[-1].cached_tokens == pytest.approx(75, abs=1)


def test_a_report_that_could_not_be_sent_goes_with_the_next(
    ledger: StepLedger, clock: Clock
) -> None:
    answer(ledger, clock, generation("a"), tokens=2, gap_s=0.5)
    first = ledger.take()
    answer(ledger, clock, generation("b"), tokens=4, gap_s=0.5)

    both = first.and_then(ledger.take())

    assert (both.arrived, both.ended, len(both.arrivals), len(both.latencies)) == (2, 2, 2, 2)
    assert both.window_s == pytest.approx(3.0)


def test_a_report_has_what_came_since_the_one_before(ledger: StepLedger, clock: Clock) -> None:
    for number in range(MOST_KEPT + 10):
        ledger.came(generation(f"{number}"))
    first, second = ledger.take(), ledger.take()

    assert (first.arrived, len(first.arrivals)) == (MOST_KEPT + 10, MOST_KEPT)
    assert first.arrivals[0].at == 1100.0
    assert (second.arrived, second.arrivals) == (0, [])


def step(
    ledger: StepLedger, clock: Clock, work: StepWork, seconds: float, waits: ExpertWaits = NOTHING
) -> None:
    """Run a step that follows none."""
    ledger.resumed()
    run(ledger, clock, work, seconds, waits)


def run(
    ledger: StepLedger, clock: Clock, work: StepWork, seconds: float, waits: ExpertWaits = NOTHING
) -> None:
    ledger.began(PlannedStep())
    ledger.work = work
    clock.now_s += seconds
    ledger.ended(PlannedStep(), Computed(1, None, ChoiceCounts(), waits, seconds, "", ()), seconds)


def num_measured(ledger: StepLedger, num_steps: int) -> int:
    """Begin some steps; how many of them are measured."""
    count = 0
    for _ in range(num_steps):
        ledger.began(PlannedStep())
        count += ledger.work is not None
    return count


def test_attention_is_what_a_step_takes_without_its_waits(ledger: StepLedger, clock: Clock) -> None:
    for rows in range(1, 60):
        work = StepWork(CHOICE.experts(rows), 0, rows, 100 * rows, 0)
        waits = ExpertWaits(8, 0.004, 0.001, messages=16, nbytes=64 * rows)
        step(ledger, clock, work, 0.004 + 1e-4 * rows, waits)

    costs = ledger.take().costs

    attention = fitted(PART_TERMS["attention"], costs["attention"])
    assert attention.seconds(1, 30, 3000, 0) == pytest.approx(3e-3, rel=0.02)
    whole = fitted(PART_TERMS["step"], costs["step"])
    assert whole.seconds(1, CHOICE.experts(30), 0, 30, 3000, 0) == pytest.approx(7e-3, rel=0.02)
    link = fitted(PART_TERMS["link.intra"], costs["link.intra"])
    assert link.seconds(16, 16, 64 * 30) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize(("rests", "seconds"), [(False, 6.0), (True, 1.0)])
def test_a_step_counts_from_the_end_of_the_last_unless_there_was_no_work(
    ledger: StepLedger, clock: Clock, rests: bool, seconds: float
) -> None:
    step(ledger, clock, WORK, seconds)
    for _ in range(8):
        clock.now_s += 5.0  # to plan, or without work
        if rests:
            ledger.resumed()
        run(ledger, clock, WORK, 1.0)

    cost = fitted(PART_TERMS["step"], ledger.take().costs["step"])
    assert cost.seconds(1, *WORK) == pytest.approx(seconds)


def test_where_experts_are_in_the_process_there_are_whole_steps_alone(
    ledger: StepLedger, clock: Clock
) -> None:
    step(ledger, clock, WORK, 0.01)

    report = ledger.take()

    assert set(report.costs) == {"step"}


def test_costs_that_a_dispatcher_measures_are_in_the_report(
    ledger: StepLedger, clock: Clock
) -> None:
    more = CostBook()
    more.add("gather", (1, 64), 0.02)
    step(ledger, clock, WORK, 0.01)

    assert set(ledger.take(more).costs) == {"step", "gather"}


def test_of_many_short_steps_some_are_measured(ledger: StepLedger) -> None:
    measured = []
    for _ in range(3):
        measured.append(num_measured(ledger, 2000))
        assert ledger.take().costs == {}

    assert measured[0] == 2000
    assert all(MEASURED_STEPS / 2 <= count <= 2 * MEASURED_STEPS for count in measured[1:])


def test_long_steps_after_many_short_ones_are_measured(ledger: StepLedger) -> None:
    for _ in range(2):
        num_measured(ledger, 100 * MEASURED_STEPS)
        ledger.take()
    measured = []
    for _ in range(10):
        measured.append(num_measured(ledger, 8))
        ledger.take()

    assert measured[1:] == 9 * [8]
