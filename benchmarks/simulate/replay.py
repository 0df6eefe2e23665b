"""The same requests in the simulator: with the batcher of the engine, its limits, and the costs that were fitted."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.simulate.load import TimedAnswer
from moesaic.costs import RandomChoice, fitted, merged
from moesaic.engine.simulated import BatcherPlanner
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.limits import EngineLimits
from moesaic.messages.performance import PART_TERMS, FitSums, PerformanceModel
from moesaic.messages.scaling import FleetShape
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.flops import flops_of
from moesaic.services.attention.settings import AttentionSettings
from moesaic.simulation.arrivals import ArrivalTrace, Floats
from moesaic.simulation.event_loop import EventLoop
from moesaic.simulation.fleet import NO_DELAYS, PathDelays, SimulatedFleet
from moesaic.simulation.records import RequestRecords
from moesaic.simulation.step_clock import MeasuredSteps, StepClock

ONE_WORKER = FleetShape(1, 1)


class BatcherMaker:
    """Makes batchers as an attention worker of a suite has them, but for its prefix cache: no prompts begin alike."""

    def __init__(self, model: Path, num_blocks: int) -> None:
        """Take the limits that a worker of this model has by default; it has ``num_blocks`` KV blocks."""
        settings, config = AttentionSettings.model_construct(), load_config(model)
        self.limits = EngineLimits(
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            settings.max_num_queued_reqs,
            settings.max_num_queued_tokens,
            config.max_positions,
        )
        self.choice = RandomChoice(config.moe.num_experts, config.moe.top_k)
        self._num_blocks, self._flops = num_blocks, flops_of(config)
        self._num_layers, self._step_target_s = config.num_layers, settings.step_target_s

    def planner(self) -> BatcherPlanner:
        """Make the planner of one worker."""
        return BatcherPlanner(
            Batcher(
                self.limits,
                self._num_blocks,
                None,
                self._num_layers,
                self._flops,
                self._step_target_s,
            )
        )


@dataclass(frozen=True)
class CalibratedSuite:
    """All that a simulation of one suite knows.

    Attributes:
        model: costs of a step.
        delays: outside of the worker.
        batchers: of its worker.
    """

    model: PerformanceModel
    delays: PathDelays
    batchers: BatcherMaker

    def slower(self, factor: float) -> "CalibratedSuite":
        """Make one whose steps take so many times as long."""
        step = self.model.parts["step"]
        unit_s = tuple(factor * each for each in step.unit_s)
        parts = {"step": msgspec.structs.replace(step, unit_s=unit_s)}
        return replace(self, model=PerformanceModel(parts=parts))

    def serve(self, trace: ArrivalTrace) -> RequestRecords:
        """Simulate a load until all is answered."""
        clock = StepClock(MeasuredSteps(self.model, self.batchers.choice), ONE_WORKER)
        fleet = SimulatedFleet(EventLoop(), trace, self.batchers.planner, clock, delays=self.delays)
        fleet.loop.run()
        return fleet.records


def calibrated(
    alone: Sequence[TimedAnswer], reported: Sequence[FitSums], batchers: BatcherMaker
) -> CalibratedSuite:
    """Solve for the costs that workers reported, then add the middle of all delays of first tokens beyond them.

    Args:
        alone: answers, of which each had the suite for itself.
        reported: costs of steps.
        batchers: of such a worker.
    """
    steps = fitted(PART_TERMS["step"], merged(reported))
    model = PerformanceModel(parts={"step": steps})
    bare = CalibratedSuite(model, NO_DELAYS, batchers)
    missing_s = [each.ttft_s - float(bare.serve(trace_of([each])).ttft_s[0]) for each in alone]
    return CalibratedSuite(model, PathDelays(max(0.0, statistics.median(missing_s))), batchers)


def trace_of(load: Sequence[TimedAnswer]) -> ArrivalTrace:
    """Make the trace of a load that was served, with the times at which its requests were sent."""
    return ArrivalTrace.of(
        np.array([each.sent_s for each in load]),
        np.array([each.prompt_tokens for each in load]),
        np.array([each.answer_tokens for each in load]),
    )


def latencies(ttft_s: Floats, tpot_s: Floats) -> dict[str, float]:
    """Gather mean and 90th percentile, in ms; nothing counts that is NaN."""
    found = {}
    for name, values in (("ttft", ttft_s), ("tpot", tpot_s)):
        known = values[~np.isnan(values)] * 1e3
        found[f"{name}_mean_ms"] = float(known.mean())
        found[f"{name}_p90_ms"] = float(np.percentile(known, 90, method="inverted_cdf"))
    return found


def measured(load: Sequence[TimedAnswer]) -> dict[str, float]:
    """Gather the latencies of a load that was served, from when each request was sent."""
    return latencies(
        np.array([each.ttft_s for each in load]),
        np.array([each.tpot_s for each in load if each.answer_tokens > 1]),
    )


def relative_errors(simulated: dict[str, float], real: dict[str, float]) -> dict[str, Any]:
    """Compare the same figures: how much more the simulator says, as a part of what was measured."""
    return {
        name.removesuffix("_ms"): round(simulated[name] / value - 1, 4)
        for name, value in real.items()
    }
