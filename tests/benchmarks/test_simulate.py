from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.common.suite import DEMO
from benchmarks.simulate.load import TimedAnswer
from benchmarks.simulate.replay import (
    ONE_WORKER,
    BatcherMaker,
    CalibratedSuite,
    calibrated,
    latencies,
    measured,
    relative_errors,
    trace_of,
)
from benchmarks.simulate.rounds import PREDICTED, PlannedLoad
from moesaic.costs import CostFit
from moesaic.engine.simulated import BatcherPlanner
from moesaic.messages.performance import PART_TERMS, FitSums, PartCost, PerformanceModel
from moesaic.simulation.arrivals import ArrivalTrace, RateCurve
from moesaic.simulation.event_loop import EventLoop
from moesaic.simulation.fleet import PathDelays, SimulatedFleet
from moesaic.simulation.planning import StepOutcome
from moesaic.simulation.step_clock import MeasuredSteps, StepClock

UNIT_S = (0.004, 5e-5, 2.5e-4, 6e-4, 1.5e-6, 3e-7)
MODEL = PerformanceModel(parts={"step": PartCost(terms=PART_TERMS["step"], unit_s=UNIT_S)})
BATCHERS = BatcherMaker(DEMO, num_blocks=1024)
CHOICE = BATCHERS.choice
DELAYS = PathDelays(0.006)


class WatchedPlanner(BatcherPlanner):
    """Notes when each request has its tokens."""

    def __init__(self, loop: EventLoop, token_s: dict[int, list[float]]) -> None:
        super().__init__(BATCHERS.planner().batcher)
        self._loop, self._token_s = loop, token_s

    def took(self, num_steps: int, seconds: float) -> StepOutcome:
        running = list(self.batcher.running)
        before = [len(sequence.tokens) for sequence in running]
        outcome = super().took(num_steps, seconds)
        for sequence, length in zip(running, before, strict=True):
            if len(sequence.tokens) != length:
                number = int(sequence.request.key.request_id)
                self._token_s.setdefault(number, []).append(self._loop.now_s)
        return outcome


def served(load: PlannedLoad, seed: int) -> list[TimedAnswer]:
    """Answers of a suite whose costs are known."""
    return answers_of(RateCurve.constant(10 * load.share, 20.0).arrivals(load.mix.lengths(), seed))


def answers_of(trace: ArrivalTrace) -> list[TimedAnswer]:
    loop, token_s = EventLoop(), dict[int, list[float]]()
    clock = StepClock(MeasuredSteps(MODEL, BATCHERS.choice), ONE_WORKER)
    SimulatedFleet(loop, trace, lambda: WatchedPlanner(loop, token_s), clock, delays=DELAYS)
    loop.run()
    columns = (trace.prompt_tokens, trace.answer_tokens, trace.at_s)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [TimedAnswer(p, a, at, at, token_s[i]) for i, (p, a, at) in enumerate(rows)]


def reported(unit_s: Sequence[float]) -> FitSums:
    """Sums of a worker whose steps cost that."""
    fit = CostFit(PART_TERMS["step"], forget=1.0)
    for rows in range(1, 30):
        for prompt, keys, prompt_keys in ((0, 100 * rows, 0), (8 * rows, 7, 40 * rows**2)):
            amounts = (1, CHOICE.experts(rows + prompt), prompt, rows, keys, prompt_keys)
            fit.add(amounts, float(np.dot(amounts, unit_s)))
    return fit.sums()


def test_loads_that_costs_were_not_fitted_on_are_predicted() -> None:
    trace = ArrivalTrace.of(np.arange(8.0), np.full(8, 16), np.full(8, 4))
    suite = calibrated(answers_of(trace), [reported(UNIT_S)] * 2, BATCHERS)

    assert suite.delays.entry_s == pytest.approx(DELAYS.entry_s, abs=0.001)
    for load in PREDICTED.values():
        real = served(load, seed=9)
        records = suite.serve(trace_of(real))
        errors = relative_errors(latencies(records.ttft_s, records.tpot_s), measured(real))
        assert max(map(abs, errors.values())) < 0.02


def test_slower_steps_take_so_much_longer() -> None:
    suite = CalibratedSuite(MODEL, DELAYS, BATCHERS).slower(1.5)

    assert suite.model.parts["step"].unit_s == pytest.approx([1.5 * each for each in UNIT_S])
    assert (suite.delays, suite.batchers) == (DELAYS, BATCHERS)


def test_the_true_costs_predict_without_error() -> None:
    real = served(PREDICTED["high"], seed=9)

    records = CalibratedSuite(MODEL, DELAYS, BATCHERS).serve(trace_of(real))

    found = latencies(records.ttft_s, records.tpot_s)
    assert found == pytest.approx(measured(real))
