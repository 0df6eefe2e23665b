"""Forecasts: recent arrivals, replayed on a fleet of some shape, as dense as they came or denser.

Each request joins the worker with the fewest. The fleet begins as the last arrivals of the window would leave it,
since one that begins idle would look better than it is while answers are long. The replay is over with the window,
except for steps in progress: requests without a first token count by their wait, generations by the tokens they had.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput
from moesaic.messages.scaling import FleetShape, ScalingForecast
from moesaic.scaling.contract import (
    Objectives,
    RecentDemand,
    ServingLimits,
    StepRows,
    StepTime,
    StepTimes,
)
from moesaic.scaling.replay_worker import ReplayedRequests, ReplayWorker

_LOOK_EVERY = 32  # arrivals


def forecast(
    demand: RecentDemand,
    shape: FleetShape,
    times: StepTimes,
    limits: ServingLimits,
    objectives: Objectives,
    headroom: float = 1.0,
) -> ScalingForecast:
    """Predict latencies and load of a fleet.

    Args:
        demand: to be replayed.
        shape: shape of the fleet.
        times: times of its steps. Steps without prompts are timed at both ends of a run, and grow evenly between.
        limits: limits of each attention worker.
        objectives: targets.
        headroom: factor on the rate of arrivals.

    Returns:
        The forecast, without a cost. Without requests all targets are met.

    Raises:
        InvalidInput: the shape has no attention worker, or ``headroom`` is not positive.
    """
    replay = _Replay(demand, shape, times, limits, objectives, headroom)
    replay.run()
    return replay.forecast()


def meets(
    demand: RecentDemand,
    shape: FleetShape,
    times: StepTimes,
    limits: ServingLimits,
    objectives: Objectives,
    headroom: float = 1.0,
) -> bool:
    """Return true if ``forecast`` would attain the objectives; stops once too many requests are late."""
    return _Replay(demand, shape, times, limits, objectives, headroom).run(objectives.attainment)


def warm_up_s(demand: RecentDemand, objectives: Objectives) -> float:
    """Return the length of the part of the window that a replay begins with.

    Mean life of requests in flight while targets are met; longer ones are more often in flight.
    """
    answers = demand.answer_tokens.astype(np.float64)
    if not len(answers):
        return 0.0
    lived_s = objectives.ttft_s + objectives.tpot_s * float((answers**2).sum() / answers.sum())
    return min(demand.window_s, lived_s)


class _Replay:
    def __init__(
        self,
        demand: RecentDemand,
        shape: FleetShape,
        times: StepTimes,
        limits: ServingLimits,
        objectives: Objectives,
        headroom: float,
    ) -> None:
        if shape.attention < 1:
            raise InvalidInput("shape", f"must have an attention worker, got {shape}")
        if not 0 < headroom < math.inf:
            raise InvalidInput("headroom", f"must be positive and finite, got {headroom:g}")
        self._shape, self._objectives = shape, objectives
        self._end_s = demand.window_s / headroom
        self._begin_s = -warm_up_s(demand, objectives) / headroom
        self._requests = _requests(demand, self._begin_s, self._end_s, headroom, objectives)

        def time_of(rows: StepRows) -> StepTime:
            return times.step(rows, shape)

        self._workers = [
            ReplayWorker(self._requests, time_of, limits) for _ in range(shape.attention)
        ]

    def run(self, attainment: float | None = None) -> bool:
        """Replay everything; with an attainment only as long as it may be reached, else false."""
        requests, workers = self._requests, self._workers
        most_late = len(requests.at_s) if attainment is None else self._most_late(attainment)
        ttft_limit_s = self._objectives.ttft_s
        for request, at_s in enumerate(requests.at_s):
            for worker in workers:
                if worker.next_s <= at_s:
                    worker.advance(at_s)
            min(workers, key=_num_open).add(request, at_s)
            if request % _LOOK_EVERY == 0 and attainment is not None:
                overdue = sum(worker.overdue(at_s - ttft_limit_s) for worker in workers)
                if requests.num_late + overdue > most_late:
                    return False
        for worker in workers:
            worker.close(self._end_s)
        return requests.num_late + self._num_overdue() <= most_late

    def forecast(self) -> ScalingForecast:
        """Sum up a finished replay."""
        requests = self._requests
        counted = range(requests.counted_from, len(requests.at_s))
        ttft_s = [requests.ttft_s.get(i, self._end_s - requests.at_s[i]) for i in counted]
        tpot_s = [requests.tpot_s[i] for i in counted if i in requests.tpot_s]
        seconds = (self._end_s - self._begin_s) or math.inf
        late = requests.num_late + self._num_overdue()
        return ScalingForecast(
            shape=self._shape,
            attainment=1 - late / len(counted) if counted else 1.0,
            ttft_p90_s=_percentile_90(ttft_s),
            tpot_p90_s=_percentile_90(tpot_s),
            attention_busy=min(
                1.0,
                sum(each.attention_s for each in self._workers) / seconds / self._shape.attention,
            ),
            experts_busy=min(1.0, sum(each.experts_s for each in self._workers) / seconds),
        )

    def _num_overdue(self) -> int:
        """Count requests whose wait has no end yet, and is too long already."""
        requests, most_s = self._requests, self._objectives.ttft_s
        return sum(
            self._end_s - requests.at_s[i] > most_s
            for i in range(requests.counted_from, len(requests.at_s))
            if i not in requests.ttft_s
        )

    def _most_late(self, attainment: float) -> int:
        """Return how many may be late, with the arithmetic of ``forecast``."""
        number = len(self._requests.at_s) - self._requests.counted_from
        most = math.ceil(number * (1 - attainment))
        while most > 0 and 1 - most / number < attainment:
            most -= 1
        return most


def _requests(
    demand: RecentDemand, begin_s: float, end_s: float, headroom: float, objectives: Objectives
) -> ReplayedRequests:
    """Lay out all requests, those of the warm-up before time 0."""
    at_s: NDArray[np.float64] = np.clip(demand.at_s / headroom, 0.0, end_s)
    early = np.flatnonzero(at_s - end_s >= begin_s) if begin_s < 0 else np.array([], dtype=int)
    order = np.concatenate([early, np.arange(len(at_s))])
    return ReplayedRequests(
        at_s=np.concatenate([at_s[early] - end_s, at_s]).tolist(),
        prompt_tokens=np.maximum(1, demand.prompt_tokens[order]).tolist(),
        answer_tokens=np.maximum(1, demand.answer_tokens[order]).tolist(),
        counted_from=len(early),
        ttft_limit_s=objectives.ttft_s,
        tpot_limit_s=objectives.tpot_s,
    )


def _num_open(worker: ReplayWorker) -> int:
    return worker.num_open


def _percentile_90(values: Sequence[float]) -> float:
    """Return the least value that at least 90 of 100 do not exceed; 0 without values."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(0.9 * len(ranked)) - 1)] if ranked else 0.0
