"""Load and costs of the workers, from their reports."""

import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.load_view import KEPT, REPORT_EVERY_S, STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.costs import model_of_fleet
from moesaic.messages.performance import LoadReport, PerformanceModel
from moesaic.messages.scaling import ScalingPolicy
from moesaic.scaling.contract import Objectives
from moesaic.services.scheduler.following import follow_while_leading
from moesaic.services.scheduler.scaling.sane_reports import sane

LATELY_S = 3 * REPORT_EVERY_S  # a worker that is silent for longer may be gone, or cut off
FEW_ANSWERS = 10  # fewer say nothing
_FORGET_S = 3600.0  # costs of a worker that left are known for so long
_NEWEST = 16  # reports, of which one at least makes sense
_MOST_WORKERS = 4096  # whose costs are known
_reports: "msgspec.msgpack.Decoder[LoadReport]" = msgspec.msgpack.Decoder(LoadReport)


@dataclass(frozen=True)
class MeasuredLoad:
    """Recent load that the workers reported.

    Attributes:
        attainment: share of requests that met both targets; None if too few have ended.
        ttft_p90_s: 90th percentile of TTFT; None also if a tenth of first tokens never came.
        tpot_p90_s: 90th percentile of TPOT; None also without later tokens.
        waiting: requests that have not begun.
    """

    attainment: float | None = None
    ttft_p90_s: float | None = None
    tpot_p90_s: float | None = None
    waiting: int = 0


class LoadFeed:
    """Reads the reports while its scheduler leads.

    Clocks of workers differ, so reports are ordered by their arrival here.

    Attributes:
        is_caught_up: all reports from before this scheduler led have been read.
    """

    def __init__(
        self, bus: Bus, leadership: Leadership, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.is_caught_up = False
        self._newest: tuple[str, int, float] | None = None  # report, of those that were there
        self._lost_at = float("-inf")
        self._bus, self._leadership, self._wall_clock = bus, leadership, wall_clock
        self._keep_s = ScalingPolicy().window_s
        self._recent: deque[_Came] = deque()  # in the order in which they came
        self._seen: set[tuple[str, int, float]] = set()  # of these
        self._last: dict[str, _Came] = {}  # by worker, with its costs

    async def run(self) -> None:
        """Take in every report while this scheduler leads, for ever.

        A new leader begins with those that Redis has, oldest first.
        """
        await follow_while_leading(
            self._bus,
            self._leadership,
            STREAM,
            _reports,
            self._take_next,
            begin=self._begin,
            rest=self._rest,
            end=self._forget,
        )

    async def _begin(self) -> None:
        found = await self._bus.latest(STREAM, _reports, _NEWEST)
        keys = (_key(each) for each in reversed(found) if math.isfinite(each.at))
        self._newest = next(keys, None)
        self.is_caught_up = self._newest is None
        self._lost_at = self._bus.last_lost

    def _take_next(self, report: LoadReport) -> None:
        self.take(report)
        self.is_caught_up = self.is_caught_up or _key(report) == self._newest
        self._lost_at = self._bus.last_lost

    def _rest(self) -> None:
        # There is no news because there is none.
        if self._bus.last_lost == self._lost_at:
            self.is_caught_up = True
        self._lost_at = self._bus.last_lost

    def take(self, report: LoadReport) -> None:
        """Keep one report; a repeated or inconsistent one changes nothing."""
        now_s = self._wall_clock()
        kept = sane(report, now_s)
        if kept is None or _key(kept) in self._seen:
            return
        last = self._last.get(kept.worker_id)
        if last is not None and kept.generation < last.report.generation:
            return
        # What is read late, after a change of leaders, was told long ago.
        came_s = now_s if self.is_caught_up else min(now_s, kept.at)
        self._last[kept.worker_id] = _Came(came_s, kept)
        self._recent.append(_Came(came_s, replace(kept, costs={})))
        self._seen.add(_key(kept))
        while self._recent and (
            len(self._recent) > KEPT or self._recent[0].at_s < now_s - self._keep_s
        ):
            self._seen.discard(_key(self._recent.popleft().report))
        silent = [name for name, each in self._last.items() if each.at_s < now_s - _FORGET_S]
        for name in silent:
            del self._last[name]
        while len(self._last) > _MOST_WORKERS:
            del self._last[min(self._last, key=lambda name: self._last[name].at_s)]

    def recent(self, window_s: float) -> list[LoadReport]:
        """The reports that end within the last ``window_s``, without costs; as many seconds are kept from now on."""
        self._keep_s = max(self._keep_s, window_s)
        since = self._wall_clock() - window_s
        return [each.report for each in self._recent if each.report.at >= since]

    def heard(self, worker_ids: Iterable[str]) -> bool:
        """Return true if each of these workers has reported recently."""
        since = self._wall_clock() - LATELY_S
        last = (self._last.get(worker_id) for worker_id in worker_ids)
        return all(each is not None and each.at_s >= since for each in last)

    def measured(
        self,
        window_s: float,
        objectives: Objectives,
        worker_ids: Container[str],
        since_s: float = -math.inf,
    ) -> MeasuredLoad:
        """Sum up the load of the last ``window_s``; answers that a report names stand for all of its own.

        Args:
            window_s: length of the window.
            objectives: targets.
            worker_ids: present workers: only their requests wait.
            since_s: seconds since 1970; requests that ended earlier do not count.
        """
        answers = [
            (each, max(1.0, report.ended / len(report.latencies)))
            for report in self.recent(window_s)
            if report.at - report.window_s >= since_s
            for each in report.latencies
        ]
        all_weights = sum(weight for _, weight in answers)
        lately_s = self._wall_clock() - LATELY_S
        waiting = sum(
            each.report.waiting
            for name, each in self._last.items()
            if name in worker_ids and each.at_s >= lately_s
        )
        if all_weights < FEW_ANSWERS:
            return MeasuredLoad(waiting=waiting)
        in_time = [
            weight
            for each, weight in answers
            if each.ttft_s <= objectives.ttft_s and each.tpot_s <= objectives.tpot_s
        ]
        return MeasuredLoad(
            attainment=sum(in_time) / all_weights,
            ttft_p90_s=_p90([(each.ttft_s, weight) for each, weight in answers]),
            tpot_p90_s=_p90([(each.tpot_s, weight) for each, weight in answers if each.tpot_s > 0]),
            waiting=waiting,
        )

    def model(self) -> PerformanceModel:
        """Make the performance model of all that workers have measured; a report has all of its worker's costs."""
        since = self._wall_clock() - _FORGET_S
        latest = [each.report.costs for each in self._last.values() if each.at_s >= since]
        return model_of_fleet(latest, source="measured by the fleet")

    def _forget(self) -> None:
        self.is_caught_up = False
        self._recent.clear()
        self._seen.clear()
        self._last.clear()


class _Came(NamedTuple):
    at_s: float  # by our clock
    report: LoadReport


def _key(report: LoadReport) -> tuple[str, int, float]:
    return report.worker_id, report.generation, report.at


def _p90(weighted: list[tuple[float, float]]) -> float | None:
    """Return the weighted 90th percentile of times."""
    left = 0.9 * sum(weight for _, weight in weighted)
    for seconds, weight in sorted(weighted):
        left -= weight
        if left <= 1e-9:
            return seconds if math.isfinite(seconds) else None
    return None
