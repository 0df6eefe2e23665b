"""Profiles that edge agents report: links, memory, and the cost of experts elsewhere."""

import time
from dataclasses import dataclass, field

import msgspec
import structlog

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.messages.placement import Placement
from moesaic.messages.site_profile import SiteProfile
from moesaic.services.scheduler.following import follow_while_leading

log = structlog.get_logger()

STREAM = "ctl:profiles"
MOST_SITES = 1024
HALF_LIFE_S = 60.0  # of what experts elsewhere cost: links change
UNKNOWN_SLOWDOWN = 0.1
SLOWDOWN_HALF_LIFE_S = 900.0  # of what was measured of it: the mix of requests changes
UNKNOWN_WEIGHS_S = 1.0  # of layers of experts, beside what was measured
SILENT_S = 60.0  # a profile that is older says nothing of now,
SILENT_WINDOWS = 3  # unless it tells of a time so long that the next is not overdue
_decoder: "msgspec.msgpack.Decoder[SiteProfile]" = msgspec.msgpack.Decoder(SiteProfile)


@dataclass
class _Site:
    """Reports of one agent: sums of its windows, older ones counting less."""

    latest: SiteProfile
    at_s: float
    away: float = 0.0  # choices without a slot there
    away_s: float = 0.0
    choices: float = 0.0  # while nothing was moved
    layers_s: float = 0.0  # that layers of experts took for these
    window_s: float = 0.0  # that these windows took
    moving_s: float = 0.0  # that layers took while experts were moved,
    expected_s: float = 0.0  # and would have taken at the pace of right before

    def note_pace(
        self, profile: SiteProfile, choices: int, passed_s: float, *, moving: bool
    ) -> None:
        keep = 0.5 ** (passed_s / SLOWDOWN_HALF_LIFE_S)
        self.moving_s, self.expected_s = self.moving_s * keep, self.expected_s * keep
        if not moving:
            keep = 0.5 ** (passed_s / HALF_LIFE_S)
            self.choices = self.choices * keep + choices
            self.layers_s = self.layers_s * keep + profile.layers_s
            self.window_s = self.window_s * keep + profile.window_s
        elif self.choices >= 1:
            self.moving_s += profile.layers_s
            self.expected_s += choices * self.layers_s / self.choices


@dataclass
class ServedChoices:
    """Choices of all sites under one epoch.

    Attributes:
        epoch: epoch of the placement.
        choices: number of choices.
        local: number of choices with a slot at their own site.
        away_s: seconds that layers waited for the others.
    """

    epoch: int
    choices: int = 0
    local: int = 0
    away_s: float = 0.0
    seen: set[str] = field(default_factory=set)  # sites whose window with the switch in it is over


class SiteProfiles:
    """Reads the profiles while its scheduler leads.

    Attributes:
        migrating: experts are being moved now.
    """

    def __init__(self, bus: Bus, leadership: Leadership) -> None:
        self.migrating = False
        self._bus, self._leadership = bus, leadership
        self._sites: dict[str, _Site] = {}
        self._served = ServedChoices(0)

    def served(self, epoch: int) -> ServedChoices:
        """Count choices under an epoch, from the first call with it on; earlier epochs are forgotten."""
        if self._served.epoch != epoch:
            self._served = ServedChoices(epoch)
        return self._served

    async def run(self) -> None:
        """Take in every profile while this scheduler leads, for ever."""
        await follow_while_leading(
            self._bus,
            self._leadership,
            STREAM,
            _decoder,
            lambda profile: self.take(profile, time.monotonic()),
            begin=self._sites.clear,
        )

    def take(self, profile: SiteProfile, now_s: float) -> None:
        """Take in one profile, which arrived at ``now_s`` of a monotonic clock."""
        site = self._sites.get(profile.worker_id)
        if site is not None and profile.generation < site.latest.generation:
            return
        if site is None and len(self._sites) >= MOST_SITES:
            oldest = min(self._sites, key=lambda name: self._sites[name].at_s)
            del self._sites[oldest]
        if site is None:
            site = self._sites[profile.worker_id] = _Site(profile, now_s)
        passed_s = max(0.0, now_s - site.at_s)
        keep = 0.5 ** (passed_s / HALF_LIFE_S)
        site.away = site.away * keep + profile.cached + profile.loaded + profile.remote
        site.away_s = site.away_s * keep + profile.away_s
        choices = profile.local + profile.cached + profile.loaded + profile.remote
        site.note_pace(profile, choices, passed_s, moving=self.migrating)
        if profile.worker_id in self._served.seen:
            self._served.choices += choices
            self._served.local += profile.local
            self._served.away_s += profile.away_s
        self._served.seen.add(profile.worker_id)
        site.latest, site.at_s = profile, now_s

    def of(self, worker_id: str, now_s: float) -> SiteProfile | None:
        """The last profile of an agent; None if it reported none recently."""
        site = self._sites.get(worker_id)
        if site is None or now_s - site.at_s >= max(
            SILENT_S, SILENT_WINDOWS * site.latest.window_s
        ):
            return None
        return site.latest

    def remote_s(self, worker_id: str, now_s: float) -> float | None:
        """Seconds that a choice costs one agent if its expert is elsewhere.

        Measured over its rows; older ones count less. Before there were any, the time of its
        cheapest link for one row. None if neither is known.
        """
        site = self._sites.get(worker_id)
        if site is not None and site.away >= 1:
            return site.away_s / site.away
        profile = self.of(worker_id, now_s)
        links = profile.links if profile is not None else []
        return min((link.rtt_s + link.message_s + link.row_s for link in links), default=None)

    def bytes_per_s(self, worker_id: str, now_s: float) -> float | None:
        """Bandwidth at which an agent can load experts, by its slowest link; None if it is not known.

        The slowest counts, because the source of an expert is chosen when it is loaded.
        """
        profile = self.of(worker_id, now_s)
        links = profile.links if profile is not None else []
        return min((link.bytes_per_s for link in links), default=None)

    def busy_s_per_s(self, worker_ids: list[str], now_s: float) -> float:
        """Seconds per second that some agents together spent in layers of experts in the last minutes."""
        found = [self._sites.get(worker_id) for worker_id in worker_ids]
        return sum(each.layers_s / each.window_s for each in found if each and each.window_s > 0)

    @property
    def slowdown(self) -> float:
        """Relative slowdown of layers of experts while experts are moved.

        It is a tenth until it is measured, and again as the measurement ages.
        """
        expected_s = UNKNOWN_WEIGHS_S + sum(site.expected_s for site in self._sites.values())
        moving_s = UNKNOWN_WEIGHS_S * (1 + UNKNOWN_SLOWDOWN)
        moving_s += sum(site.moving_s for site in self._sites.values())
        return max(0.0, moving_s / expected_s - 1)

    def missing(self, placement: Placement, now_s: float) -> list[str]:
        """Workers of a placement that have not recently reported the cost of experts elsewhere."""
        return [
            worker.worker_id
            for worker in placement.workers
            if self.remote_s(worker.worker_id, now_s) is None
            or self.bytes_per_s(worker.worker_id, now_s) is None
        ]
