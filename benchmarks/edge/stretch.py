"""A stretch of traffic and what became of it. Pure."""

from dataclasses import dataclass

from benchmarks.edge.counts import CountsSample, SiteCounts
from benchmarks.edge.load import EdgeAnswer


@dataclass(frozen=True)
class EdgeStretch:
    """A stretch of traffic.

    Attributes:
        began_at: time of day, in seconds since 1970.
        answers: to all requests.
        samples: samples of counts, the first before the first request, the last after the last answer.
    """

    began_at: float
    answers: list[EdgeAnswer]
    samples: list[CountsSample]

    @property
    def counts(self) -> list[SiteCounts]:
        """Counts of each server in the stretch."""
        first, last = self.samples[0].sites, self.samples[-1].sites
        return [after - before for before, after in zip(first, last, strict=True)]
