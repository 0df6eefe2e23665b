"""The scalability study: fleets of some to thousands of GPUs, over slow and fast links (DanceMoE section IV-C)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from moesaic.placement.traffic.trace import Trace
from moesaic_lab.simulation.edge import profiles
from moesaic_lab.simulation.edge.costs import EdgeCosts
from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.placing import EdgePlan, place
from moesaic_lab.simulation.edge.reference import advance as reference
from moesaic_lab.simulation.edge.routing import TaskRouting
from moesaic_lab.simulation.edge.state import Advance
from moesaic_lab.simulation.edge.study import EdgeOutcome, run
from moesaic_lab.simulation.edge.workload import EdgeWorkload, Mix, demand_of, mixes_of

SITES_AT_LEAST = 48  # in all runs of a point: small fleets run several times, with other arrivals
_ROOM = profiles.EXPERTS_PER_GPU / (profiles.NUM_LAYERS * profiles.NUM_EXPERTS)


@dataclass(frozen=True, kw_only=True)
class ScaleStudy:
    """Terms that all points of a study share.

    Attributes:
        routing: passes of the tasks.
        costs: of layers and messages.
        mix: of each site's tasks.
        requests: of each site, about.
        region_sites: sites of a region that is placed on its own; None: the whole fleet at once.
        seed: of arrivals.
    """

    routing: TaskRouting
    costs: EdgeCosts
    mix: Mix = "specialised"
    requests: int = 40
    region_sites: int | None = 6
    seed: int = 0

    @classmethod
    def of(
        cls,
        costs: str,
        trace: Trace | None = None,
        *,
        mix: Mix = "specialised",
        mean_prompt: float = profiles.MEAN_PROMPT,
        requests: int = 40,
        region_sites: int | None = 6,
        seed: int = 0,
    ) -> Self:
        """Begin a study.

        Args:
            costs: a name of ``profiles.PROFILES``.
            trace: whose rows are replayed; None: rows are drawn in the shape of DeepSeek-V2-Lite.
            mix: of each site's tasks.
            mean_prompt: mean tokens of a prompt.
            requests: of each site.
            region_sites: of a region.
            seed: of all that is drawn.
        """
        if trace is not None:
            routing = TaskRouting.of_trace(trace, mean_prompt, seed)
        else:
            routing = TaskRouting.drawn(
                profiles.NUM_TASKS,
                profiles.NUM_LAYERS,
                profiles.NUM_EXPERTS,
                profiles.TOP_K,
                mean_prompt=mean_prompt,
                skew=profiles.SKEW,
                alike=profiles.ALIKE,
                seed=seed,
            )
        return cls(
            routing=routing,
            costs=profiles.costs_of(profiles.PROFILES[costs]),
            mix=mix,
            requests=requests,
            region_sites=region_sites,
            seed=seed,
        )

    def fleet(self, num_gpus: int, mbit_per_s: float) -> EdgeFleet:
        """Make a fleet whose GPUs have room for as large a part of the experts as the paper's have."""
        room = int(_ROOM * self.routing.num_layers * self.routing.num_experts)
        return EdgeFleet.of_paper(num_gpus, room, mbit_per_s)

    def plan(self, num_gpus: int, policy: str) -> EdgePlan:
        """Place a fleet's experts; links do not count, for all are alike.

        Raises:
            InvalidInput: there is no such policy.
            PlacementInfeasible: memory cannot hold every expert.
        """
        fleet = self.fleet(num_gpus, 1.0)
        demand = demand_of(self.routing, self._mixes(fleet), 1.0, profiles.ANSWER_TOKENS - 1)
        return place(policy, fleet, demand, region_sites=self.region_sites)

    def predicted(self, num_gpus: int, plan: EdgePlan) -> float:
        """Expect the part of choices that are remote, by what the placement was made from."""
        mixes = self._mixes(self.fleet(num_gpus, 1.0))
        return plan.remote_part(demand_of(self.routing, mixes, 1.0, profiles.ANSWER_TOKENS - 1))

    def point(
        self,
        num_gpus: int,
        mbit_per_s: float,
        mean_gap_s: float,
        plan: EdgePlan,
        advance: Advance = reference,
    ) -> EdgeOutcome:
        """Simulate one fleet; small ones several times, of which the outcome is the mean.

        Args:
            num_gpus: of the fleet.
            mbit_per_s: of its links.
            mean_gap_s: between requests of one site.
            plan: its placement.
            advance: what carries out events.
        """
        fleet = self.fleet(num_gpus, mbit_per_s)
        outcomes = []
        for nth in range(-(-SITES_AT_LEAST // fleet.num_sites)):
            workload = EdgeWorkload.poisson(
                self.routing,
                self._mixes(fleet),
                mean_gap_s,
                self.requests * mean_gap_s,
                answers=profiles.ANSWER_TOKENS - 1,
                seed=self.seed + nth,
            )
            outcomes.append(run(fleet, self.costs, self.routing, workload, plan.holder, advance))
        return averaged(outcomes)

    def _mixes(self, fleet: EdgeFleet) -> list[tuple[int, ...]]:
        return mixes_of(self.mix, fleet.num_sites, len(self.routing.tasks))


def averaged(outcomes: Sequence[EdgeOutcome]) -> EdgeOutcome:
    """Add up requests and events, and take the mean of all else; runs of few requests count less."""
    count = np.array([each.requests for each in outcomes], float)
    found: dict[str, object] = {}
    for field in fields(EdgeOutcome):
        values = [getattr(each, field.name) for each in outcomes]
        if field.name in ("requests", "events"):
            found[field.name] = sum(values)
        else:
            found[field.name] = float(np.average(values, weights=count))
    return EdgeOutcome(**found)  # type: ignore[arg-type]  # all fields, by their names
