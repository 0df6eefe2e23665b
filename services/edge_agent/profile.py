"""Profiles of an agent, for operators and for the scheduler (DanceMoE section III-A)."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict

import structlog

from moesaic.cluster.redis.bus import Bus
from moesaic.dispatch.collaborative import metrics
from moesaic.errors import PeerLost
from moesaic.messages.site_profile import PeerLink, SiteProfile
from moesaic.services.edge_agent.site import Site
from moesaic.telemetry.memory import own_bytes

log = structlog.get_logger()

STREAM = "ctl:profiles"
KEPT = 256  # entries, of all agents
WHERE = ("local", "cached", "loaded", "remote")


class Profiler:
    """Describes one agent."""

    def __init__(
        self, site: Site, name: str, worker_id: str, generation: int, before_bytes: int
    ) -> None:
        """Describe an open site.

        Args:
            site: parts of the site.
            name: name of the site.
            worker_id: id of the agent.
            generation: generation of this start.
            before_bytes: memory of the process before it loaded anything.
        """
        self.site = site
        self._name, self._worker_id, self._generation = name, worker_id, generation
        self._before_bytes = before_bytes
        self._told: dict[str, float] = {}  # totals at the last report
        self._told_s = time.monotonic()

    @property
    def used_bytes(self) -> int:
        """Memory that the process took since before it loaded the model."""
        return max(0, own_bytes() - self._before_bytes)

    def profile(self) -> SiteProfile:
        """The agent since it started; ``window_s`` is 0."""
        return self._profile(_totals(), 0.0)

    def window(self) -> SiteProfile:
        """The agent since the last call."""
        totals, now_s = _totals(), time.monotonic()
        since = {name: total - self._told.get(name, 0.0) for name, total in totals.items()}
        window_s, self._told, self._told_s = now_s - self._told_s, totals, now_s
        return self._profile(since, window_s)

    def _profile(self, counts: Mapping[str, float], window_s: float) -> SiteProfile:
        site, plan = self.site, self.site.plan
        return SiteProfile(
            worker_id=self._worker_id,
            generation=self._generation,
            site=self._name,
            window_s=window_s,
            memory_limit_bytes=plan.limit_bytes,
            memory_used_bytes=self.used_bytes,
            num_slots=plan.num_slots,
            expert_bytes=site.host.files.expert_bytes,
            load_s=site.files.load_s if site.files else 0.0,
            links=[
                PeerLink(peer=peer, **asdict(each)) for peer, each in site.peers.profiles().items()
            ],
            away_s=counts["away_s"],
            layers_s=counts["layers_s"],
            **{where: int(counts[where]) for where in WHERE},
        )


async def tell_profiles(bus: Bus, profiler: Profiler, interval_s: float) -> None:
    """Report every interval to the scheduler, for ever; reports are lost while Redis is gone."""
    while True:
        await asyncio.sleep(interval_s)
        with suppress(PeerLost):
            await bus.append(STREAM, profiler.window(), max_entries=KEPT)


def _totals() -> dict[str, float]:
    found = {where: metrics.CHOICES.labels(where)._value.get() for where in WHERE}
    return {
        **found,
        "away_s": metrics.AWAY_S._value.get(),
        "layers_s": metrics.LAYERS_S._value.get(),
    }
