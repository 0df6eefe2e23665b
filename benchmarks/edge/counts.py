"""Counts of servers: where the experts that their requests chose were, and their differences. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise


@dataclass(frozen=True)
class SiteCounts:
    """Choices of a server's requests by where their experts were, and what came of it.

    Attributes:
        local: experts in slots there.
        cached: experts in memory from files.
        loaded: read from files for them.
        remote: on another server; each is a remote call as the paper counts them.
        messages: to other servers, each with the rows of one layer.
        away_s: waiting for experts that have no slot there.
        layers_s: experts of all layers, that wait included.
    """

    local: float = 0.0
    cached: float = 0.0
    loaded: float = 0.0
    remote: float = 0.0
    messages: float = 0.0
    away_s: float = 0.0
    layers_s: float = 0.0

    def __sub__(self, before: "SiteCounts") -> "SiteCounts":
        pairs = zip(astuple(self), astuple(before), strict=True)
        return SiteCounts(*(after - earlier for after, earlier in pairs))

    def __add__(self, other: "SiteCounts") -> "SiteCounts":
        pairs = zip(astuple(self), astuple(other), strict=True)
        return SiteCounts(*(one + more for one, more in pairs))

    @property
    def choices(self) -> float:
        """All of them."""
        return self.local + self.cached + self.loaded + self.remote

    @property
    def local_share(self) -> float | None:
        """Part of the choices whose experts are in slots there; None of none."""
        return self.local / self.choices if self.choices else None


@dataclass(frozen=True)
class CountsSample:
    """Counts of all servers since they started, at one moment of a stretch."""

    at_s: float
    sites: tuple[SiteCounts, ...]


def added(sites: Sequence[SiteCounts]) -> SiteCounts:
    """Add up the counts of all servers."""
    return sum(sites, SiteCounts())


def local_share_series(samples: Sequence[CountsSample], step_s: float) -> list[list[float | None]]:
    """Gather the local share of all servers together, then of each, by steps of time.

    Args:
        samples: counts in order, more frequent than steps.
        step_s: length of a step.

    Returns:
        A list for all together, then one for each server; None in steps without traffic.
    """
    edges = [samples[0]]
    for sample in samples[1:]:
        if sample.at_s - edges[-1].at_s >= step_s:
            edges.append(sample)
    found: list[list[float | None]] = [[] for _ in range(len(samples[0].sites) + 1)]
    for before, after in pairwise(edges):
        sites = [new - old for new, old in zip(after.sites, before.sites, strict=True)]
        for series, counts in zip(found, [added(sites), *sites], strict=True):
            share = counts.local_share
            series.append(None if share is None else round(share, 4))
    return found


def messages_of(stats: Mapping[str, float]) -> float:
    """Add up the messages to all peers, of a process's metrics by name."""
    name = "moesaic_site_remote_calls_total"
    return sum(value for key, value in stats.items() if key.startswith(name))
