"""Service of a fleet over days, as a flow: requests come, wait, run and end in fractions, not one by one.

Within a bin all attention workers have alike steps, as a good router has it. Latencies of requests are those of their
bin, and of the bins in which they get their answers; so what is lost are differences among requests of one moment.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import exp

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import Objectives, StepRows
from moesaic.simulation.elastic.demand import DemandSeries
from moesaic.simulation.elastic.fleet_times import FleetTimes

Floats = NDArray[np.float64]
_PROMPT_ROWS = (0.0, 64.0, 256.0, 1024.0, 2048.0)
_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0)


@dataclass(frozen=True)
class ServedDemand:
    """Latencies of the requests of each bin.

    Attributes:
        ttft_s: float64 ``[n]``, by the bin in which they came; infinite where they were not begun until the end.
        tpot_s: float64 ``[n]``, likewise.
        counts: float64 ``[n]``, requests.
    """

    ttft_s: Floats
    tpot_s: Floats
    counts: Floats

    def attainment(self, objectives: Objectives) -> float:
        """Return the part of the requests that met both targets; 1 without any."""
        met = (self.ttft_s <= objectives.ttft_s) & (self.tpot_s <= objectives.tpot_s)
        total = float(self.counts.sum())
        return float(self.counts[met].sum()) / total if total else 1.0


@dataclass
class StepTable:
    """Seconds of steps of one shape, on straight lines between a few that were computed."""

    times: FleetTimes
    shape: FleetShape
    demand: DemandSeries
    _found: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = self.times.limits(self.shape)
        self.most_sequences = min(
            float(limits.max_num_seqs), limits.kv_tokens / self.demand.context_tokens
        )
        self.most_rows = float(limits.max_num_batched_tokens)

    def seconds(self, sequences: float, prompt_rows: float) -> float:
        """Predict a step of one attention worker."""
        i, across = _place(_SEQUENCES, sequences)
        j, up = _place(_PROMPT_ROWS, prompt_rows)
        low = self._at(i, j)
        found = low + across * (self._at(i + 1, j) - low) if across else low
        if up:
            high = self._at(i, j + 1)
            high += across * (self._at(i + 1, j + 1) - high) if across else 0.0
            found += up * (high - found)
        return found

    def _at(self, i: int, j: int) -> float:
        if (i, j) not in self._found:
            sequences, prompt_rows = _SEQUENCES[i], _PROMPT_ROWS[j]
            keys = sequences * self.demand.context_tokens
            prompt_keys = prompt_rows * self.demand.prompt_tokens / 2
            rows = StepRows(prompt_rows, sequences, keys, prompt_keys)
            self._found[i, j] = self.times.step(rows, self.shape).seconds
        return self._found[i, j]


def _place(grid: Sequence[float], value: float) -> tuple[int, float]:
    """Find the point of the grid below a value, and the part of the way to the next one."""
    if value <= grid[0]:
        return 0, 0.0
    at = bisect_right(grid, value) - 1
    if at >= len(grid) - 1:
        return len(grid) - 1, 0.0
    return at, (value - grid[at]) / (grid[at + 1] - grid[at])


def serve(demand: DemandSeries, shapes: Sequence[FleetShape], times: FleetTimes) -> ServedDemand:
    """Let a fleet serve demand, first come, first served.

    Requests run on through changes of the shape: workers that go finish what they have, or hand it over.

    Args:
        demand: by bins.
        shapes: in force, one for each bin.
        times: of the fleet.
    """
    tables: dict[FleetShape, StepTable] = {}
    running = waiting = 0.0
    step_s = 0.0
    steps, begun = np.zeros(len(demand.counts)), np.zeros(len(demand.counts))
    counts, bin_s = demand.counts.tolist(), demand.bin_s
    prompt, answer = demand.prompt_tokens, demand.answer_tokens
    now = 0
    for shape, stretch in groupby(shapes):
        table = tables.setdefault(shape, StepTable(times, shape, demand))
        workers, most = shape.attention, shape.attention * table.most_sequences
        step_s = step_s or table.seconds(1.0, 0.0)
        for _ in stretch:
            waiting += counts[now]
            room = most - running + running * bin_s / (answer * step_s)
            free_rows = max(1.0, table.most_rows - running / workers)
            admitted = max(0.0, min(waiting, room, workers * free_rows / prompt * bin_s / step_s))
            waiting -= admitted
            prompt_rows = min(free_rows, admitted / bin_s * prompt * step_s / workers)
            # Requests end at a constant part of those there are, also within long bins.
            ending = bin_s / (answer * step_s)
            kept = exp(-ending)
            running = running * kept + admitted * (1 - kept) / ending
            step_s = table.seconds(running / workers, prompt_rows)
            steps[now], begun[now] = step_s, admitted
            now += 1
    return _latencies(demand, steps, begun)


def _latencies(demand: DemandSeries, steps: Floats, begun: Floats) -> ServedDemand:
    num_bins, bin_s = len(steps), demand.bin_s
    arrived, admitted = np.cumsum(demand.counts), np.cumsum(begun)
    # The last request of each bin begins in the first bin until whose end as many were admitted.
    start = np.searchsorted(admitted, arrived - 1e-6)
    waited_s = (start - np.arange(num_bins)) * bin_s
    inside = np.minimum(start, num_bins - 1)
    chunks = np.ceil(demand.prompt_tokens / max(_PROMPT_ROWS))
    ttft_s = np.where(start < num_bins, waited_s + steps[inside] * (0.5 + chunks), np.inf)
    sums = np.concatenate(([0.0], np.cumsum(steps)))
    bins = np.maximum(1, np.round(demand.answer_tokens * steps[inside] / bin_s)).astype(np.int64)
    last = np.minimum(inside + bins, num_bins)
    tpot_s = (sums[last] - sums[inside]) / (last - inside)
    return ServedDemand(ttft_s, tpot_s, demand.counts)
