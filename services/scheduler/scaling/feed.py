"""Load and costs of the workers, from their reports."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.load_view import STREAM
from moesaic.cluster.redis.bus import Bus
from moesaic.costs.book import model_of_fleet
from moesaic.messages.performance import LoadReport, PerformanceModel
from moesaic.scaling.contract import Objectives

_LOOK_S = 1.0
_FORGET_S = 3600.0  # costs of a worker that left are known for so long
_MOST_REPORTS = 10_000  # of one worker
_reports: "msgspec.msgpack.Decoder[LoadReport]" = msgspec.msgpack.Decoder(LoadReport)


@dataclass(frozen=True)
class MeasuredLoad:
    """Load that the workers told of lately.

    Attributes:
        attainment: part of the requests that met both targets; None without requests.
        ttft_p90_s: 90 of 100 first tokens took less; None without first tokens.
        tpot_p90_s: likewise, of later tokens.
        waiting: requests that have not begun.
    """

    attainment: float | None = None
    ttft_p90_s: float | None = None
    tpot_p90_s: float | None = None
    waiting: int = 0


class LoadFeed:
    """Reads the reports while its scheduler leads."""

    def __init__(
        self, bus: Bus, leadership: Leadership, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._bus, self._leadership, self._wall_clock = bus, leadership, wall_clock
        self._reports: dict[str, deque[LoadReport]] = {}  # by worker, oldest first

    async def run(self) -> None:
        """Take in every report while this scheduler leads, for ever.

        A new leader begins with those of the last hour, which Redis has.
        """
        while True:
            if self._leadership.held:
                read = self._bus.read_on(STREAM, _reports)
                async with aclosing(read) as reports:
                    async for report in reports:
                        if report is not None:
                            self.take(report)
                        if not self._leadership.held:
                            break
                self._reports.clear()
            await asyncio.sleep(_LOOK_S)

    def take(self, report: LoadReport) -> None:
        """Keep one report; one that is told again, or late, changes nothing."""
        known = self._reports.setdefault(report.worker_id, deque(maxlen=_MOST_REPORTS))
        if not known or (report.generation, report.at) > (known[-1].generation, known[-1].at):
            known.append(report)

    def recent(self, window_s: float) -> list[LoadReport]:
        """The reports that end within the last ``window_s``, by the end of what they cover."""
        since = self._wall_clock() - window_s
        found = (report for known in self._reports.values() for report in known)
        return sorted((r for r in found if r.at >= since), key=lambda report: report.at)

    def measured(self, window_s: float, objectives: Objectives) -> MeasuredLoad:
        """Sum up the load of the last ``window_s``; answers that a report names stand for all of its own."""
        recent = self.recent(window_s)
        latest = {report.worker_id: report for report in recent}.values()
        answers = [
            (each, max(1.0, report.ended / len(report.latencies)))
            for report in recent
            for each in report.latencies
        ]
        in_time = [
            weight
            for each, weight in answers
            if each.ttft_s <= objectives.ttft_s and each.tpot_s <= objectives.tpot_s
        ]
        all_weights = sum(weight for _, weight in answers)
        return MeasuredLoad(
            attainment=sum(in_time) / all_weights if answers else None,
            ttft_p90_s=_p90([(each.ttft_s, weight) for each, weight in answers]),
            tpot_p90_s=_p90([(each.tpot_s, weight) for each, weight in answers if each.tpot_s > 0]),
            waiting=sum(report.waiting for report in latest),
        )

    def model(self) -> PerformanceModel:
        """Make the performance model of all that workers have measured; a report has all of its worker's costs."""
        self._forget()
        latest = [known[-1] for known in self._reports.values() if known]
        return model_of_fleet([report.costs for report in latest], source="measured by the fleet")

    def _forget(self) -> None:
        since = self._wall_clock() - _FORGET_S
        for worker_id, known in list(self._reports.items()):
            while known and known[0].at < since:
                known.popleft()
            if not known:
                del self._reports[worker_id]


def _p90(weighted: list[tuple[float, float]]) -> float | None:
    """Find the smallest of the times that 90 of 100 do not exceed, each counting as much as its weight."""
    left = 0.9 * sum(weight for _, weight in weighted)
    for seconds, weight in sorted(weighted):
        left -= weight
        if left <= 1e-9:
            return seconds
    return None
