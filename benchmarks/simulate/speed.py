"""Speed of the simulator: events a second of one core, by planner and by size of the fleet."""

import time
from collections.abc import Callable
from typing import Any

from moesaic.costs import RandomChoice
from moesaic.messages.performance import PART_TERMS, PartCost, PerformanceModel
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import ServingLimits
from moesaic.simulation.arrivals import ArrivalTrace, RateCurve
from moesaic.simulation.continuous import ContinuousPlanner
from moesaic.simulation.event_loop import EventLoop
from moesaic.simulation.fleet import SimulatedFleet
from moesaic.simulation.planning import StepPlanner
from moesaic.simulation.step_clock import MeasuredSteps, StepClock

LIMITS = ServingLimits(max_num_seqs=64, max_num_batched_tokens=2048, kv_tokens=1 << 20)
# Of a large model on a GPU: steps of about 25 ms. They decide how many steps a second of simulated time has.
STEPS = PerformanceModel(
    parts={
        "step": PartCost(terms=PART_TERMS["step"], unit_s=(0.02, 0.0, 5e-5, 1e-4, 2e-9, 2e-10)),
    }
)
CHOICE = RandomChoice(128, 8)
REQUESTS_PER_S = 2.5  # of a worker, that keep most of it busy


def speed(
    workers: int, simulated_s: float, lengths: ArrivalTrace, planner: Callable[[], StepPlanner]
) -> dict[str, Any]:
    """Simulate Poisson arrivals of requests with such lengths until all have ended, and count the seconds."""
    trace = RateCurve.constant(REQUESTS_PER_S * workers, simulated_s).arrivals(lengths, seed=1)
    clock, loop = StepClock(MeasuredSteps(STEPS, CHOICE), FleetShape(workers, 1)), EventLoop()
    started = time.process_time()
    fleet = SimulatedFleet(loop, trace, planner, clock)
    loop.run()
    took_s = time.process_time() - started
    figures = fleet.figures()
    return {
        "workers": workers,
        "requests": figures.ended,
        "simulated_s": round(loop.now_s, 1),
        "core_s": round(took_s, 2),
        "busy": round(figures.attention_busy, 3),
        "events": figures.events,
        "events_per_s": round(figures.events / took_s),
        "actions_per_s": round(loop.num_actions / took_s),
    }


def plain() -> ContinuousPlanner:
    """Make the planner of large studies."""
    return ContinuousPlanner(LIMITS)


def step_by_step() -> ContinuousPlanner:
    """Make the same planner without runs of steps."""
    return ContinuousPlanner(LIMITS, one_by_one=True)
