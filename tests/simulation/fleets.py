"""Small fleets to simulate."""

import numpy as np

from moesaic.costs import RandomChoice
from moesaic.messages.performance import PART_TERMS, PartCost, PerformanceModel
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import ServingLimits
from moesaic.simulation.arrivals import ArrivalTrace, RateCurve
from moesaic.simulation.continuous import ContinuousPlanner
from moesaic.simulation.event_loop import EventLoop
from moesaic.simulation.fleet import NO_DELAYS, PathDelays, SimulatedFleet
from moesaic.simulation.routing import FleetRouter
from moesaic.simulation.step_clock import MeasuredSteps, StepClock


def model_of(*unit_s: float) -> PerformanceModel:
    """Make the model of steps with these costs: of a step, a prompt row, an answer row, and a key of each."""
    step_s, *others = unit_s
    cost = PartCost(terms=PART_TERMS["step"], unit_s=(step_s, 0.0, *others, unit_s[-1]))
    return PerformanceModel(parts={"step": cost})


MODEL = model_of(0.01, 1e-4, 5e-4, 1e-7)
LIMITS = ServingLimits()


def drawn_trace(
    per_s: float = 8.0, span_s: float = 60.0, seed: int = 1, most: int = 200
) -> ArrivalTrace:
    """Draw requests of up to ``most`` tokens each way, some of them with answers of one token."""
    random = np.random.default_rng(seed)
    prompts, answers = random.integers(1, most, 300), random.integers(1, most, 300)
    answers[::7] = 1
    lengths = ArrivalTrace.of(np.zeros(300), prompts, answers, prompts // 3)
    return RateCurve.constant(per_s, span_s).arrivals(lengths, seed)


def fleet_of(
    trace: ArrivalTrace,
    workers: int = 1,
    limits: ServingLimits = LIMITS,
    *,
    model: PerformanceModel = MODEL,
    one_by_one: bool = False,
    spread: float = 0.0,
    seed: int = 0,
    delays: PathDelays = NO_DELAYS,
    router: FleetRouter | None = None,
) -> SimulatedFleet:
    """Make a fleet that has not begun."""
    return SimulatedFleet(
        EventLoop(),
        trace,
        lambda: ContinuousPlanner(limits, one_by_one=one_by_one),
        StepClock(MeasuredSteps(model, RandomChoice(32, 4)), FleetShape(workers, 1), spread, seed),
        router,
        delays,
    )
