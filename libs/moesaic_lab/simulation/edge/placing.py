"""Placements of a simulated fleet, by the policies that are served with, and who computes whose rows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.policies import make_placement
from moesaic.placement.policies.matching import Held
from moesaic.placement.policies.problem import PlacementProblem
from moesaic.placement.policies.uniform import Slots
from moesaic.placement.traffic.statistics import Floats, LayerTraffic
from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.routing import Ints
from moesaic_lab.simulation.edge.state import NOBODY

# The most sites that a policy places at once, and the sites of a region beyond. Seconds of ``eplb`` and ``redundance``
# grow with the square of sites (23 s and 1.5 s for 192 of them). ``optimal`` takes 2 s for 768, and minutes for 3,072.
MOST_SITES = {"eplb": 192, "redundance": 192, "optimal": 1536}
REGION_SITES = {"eplb": 48, "redundance": 192, "optimal": 768}
MOST_SITES_OF_ANY = 4096
NEAREST = 16  # sites on a ring that a site asks before others
_SITES_AT_ONCE = 64  # that choose whom to ask: as much fits into a cache
_BYTES = 1 << 20  # of an expert; experts of one size need no true one


@dataclass(frozen=True)
class EdgePlan:
    """A placement of a fleet.

    Attributes:
        held: bool ``[N, L, E]``.
        num_regions: that were placed each on its own; 1: the whole fleet at once.
        holder: site that computes an expert for the rows of another, int32 ``[N, L, E]``.
    """

    held: Held
    num_regions: int
    holder: Ints

    def remote_part(self, demand: Floats) -> float:
        """Expect the part of choices that are remote, at a demand ``[N, L, E]``; 0 without any."""
        total = float(demand.sum())
        return float(demand[~self.held].sum()) / total if total else 0.0


def place(
    policy: str,
    fleet: EdgeFleet,
    demand: Floats,
    region_sites: int | None = None,
) -> EdgePlan:
    """Place a fleet's experts by a policy; too many sites for it are divided into regions.

    A policy that counts remote choices alone leaves experts that few want with one holder, however large the fleet
    is, and the rows of all sites queue there. Regions that each hold every expert bound that.

    Args:
        policy: by name.
        fleet: sites.
        demand: choices by origin, float64 ``[N, L, E]``.
        region_sites: of a region, about; None: as many as the policy can place at once.

    Raises:
        InvalidInput: there is no such policy.
        PlacementInfeasible: memory cannot hold every expert.
    """
    num_sites = fleet.num_sites
    most = MOST_SITES.get(policy, MOST_SITES_OF_ANY)
    size = num_sites if num_sites <= most else REGION_SITES.get(policy, most)
    size = min(size, region_sites or size)
    parts = np.array_split(np.arange(num_sites), -(-num_sites // size))
    found = np.zeros(demand.shape, bool)
    holder = np.zeros(demand.shape, np.int32)
    for sites in parts:
        mine = slice(int(sites[0]), int(sites[-1]) + 1)
        placed = make_placement(policy, _problem(fleet, demand[mine], mine))
        found[mine] = _held(placed, demand[mine].shape)
        holder[mine] = holders_of(found[mine], demand[mine]) + mine.start
    return EdgePlan(found, len(parts), holder)


def _problem(fleet: EdgeFleet, demand: Floats, sites: slice) -> PlacementProblem:
    num_sites, _, num_experts = demand.shape
    total = demand.sum(axis=0)
    nothing = LayerTraffic.none(num_experts)
    return PlacementProblem(
        traffic=tuple(
            LayerTraffic(
                each, nothing.active_batches, nothing.coactivation, 0.0, 0.0, nothing.sampled
            )
            for each in total
        ),
        slots=(num_experts,) * num_sites,
        demand=demand,
        expert_bytes=_BYTES,
        memory=tuple((_BYTES * fleet.experts_per_gpu,) * gpus for gpus in fleet.gpus[sites]),
    )


def _held(placed: list[Slots], shape: tuple[int, ...]) -> Held:
    held = np.zeros(shape, bool)
    for layer_idx, layer in enumerate(placed):
        for n, experts in enumerate(layer):
            held[n, layer_idx, [expert for expert in experts if expert >= 0]] = True
    return held


def holders_of(held: Held, demand: Floats) -> Ints:
    """Choose who computes whose rows: of the nearest holders on a ring, few, for each message costs.

    In each layer, a site asks the one of its ``NEAREST`` next sites that holds most of its missing experts, by demand.
    Then it asks the one that holds most of the rest. Experts that none of these holds are asked of the next site that
    holds them. So each site is asked by about as many others, and sites need not coordinate.

    Args:
        held: ``[N, L, E]``; every expert has a holder.
        demand: float64 ``[N, L, E]``.

    Returns:
        int32 ``[N, L, E]``; a site's own index where it holds the expert itself.
    """
    num_sites = len(held)
    own = np.arange(num_sites, dtype=np.int32)[:, None, None]
    holder = np.where(held, own, np.int32(NOBODY))
    for first in range(0, num_sites, _SITES_AT_ONCE):
        _ask_few(held, demand, holder, np.arange(first, min(first + _SITES_AT_ONCE, num_sites)))
    site, layer, expert = np.nonzero(holder == NOBODY)
    for step in range(1, num_sites):
        there = (site + step) % num_sites
        found = held[there, layer, expert]
        holder[site[found], layer[found], expert[found]] = there[found]
        site, layer, expert = (each[~found] for each in (site, layer, expert))
    assert not len(site)
    return holder


def _ask_few(held: Held, demand: Floats, holder: Ints, sites: NDArray[np.int64]) -> None:
    """Choose, in place, among the nearest of some sites."""
    num_sites = len(held)
    nearest = (sites[:, None] + np.arange(1, min(NEAREST + 1, num_sites))) % num_sites  # [n, W]
    if not nearest.size:
        return
    offers = held[nearest].astype(np.float32)  # [n, W, L, E]
    total = max(float(demand[sites].max()), 1e-30)
    lacking = np.where(held[sites], 0.0, demand[sites] / total + 1e-6).astype(np.float32)
    at = np.arange(len(sites))[:, None], np.arange(held.shape[1])[None]
    for _ in range(nearest.shape[1]):
        gain = np.einsum("nle,nwle->nwl", lacking, offers)
        best = gain.argmax(axis=1)  # [n, L]
        taken = (offers[at[0], best, at[1]] > 0) & (lacking > 0)
        if not taken.any():
            return
        asked = nearest[at[0], best][:, :, None]
        holder[sites] = np.where(taken, asked, holder[sites])
        lacking[taken] = 0
