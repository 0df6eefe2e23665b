"""A run in which placements are decided anew every interval, by the rule that is served with."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.messages.activation import ActivationWindow, LayerActivations
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.placement.decide.worth import MigrationCase, MigrationVerdict
from moesaic.placement.policies.matching import Held
from moesaic.placement.traffic.origin_traffic import OriginTraffic
from moesaic.placement.traffic.statistics import Floats
from moesaic.simulation.edge.costs import EdgeCosts
from moesaic.simulation.edge.fleet import EdgeFleet
from moesaic.simulation.edge.placing import EdgePlan, place, slots_of
from moesaic.simulation.edge.reference import advance as reference
from moesaic.simulation.edge.routing import TaskRouting
from moesaic.simulation.edge.state import Advance, EdgeState
from moesaic.simulation.edge.study import EdgeOutcome
from moesaic.simulation.edge.workload import EdgeWorkload

LOAD_SHARE = 0.5  # of each link, while experts are moved
LEAST_GAIN = 0.05  # of what remote choices cost
HALF_LIFE_S = 300.0  # after which rows count half
SETTLING_S = 30.0  # until the next look, where the routing of a site has just changed


@dataclass(frozen=True)
class ReplacingTerms:
    """Terms of re-placing.

    Attributes:
        policy: by name.
        interval_s: between decisions; infinite: the first placement stays.
        expert_bytes: of one expert's weights.
    """

    policy: str
    interval_s: float
    expert_bytes: int


@dataclass(frozen=True)
class MigratingOutcome:
    """Figures of a run with decisions.

    Attributes:
        outcome: of all requests.
        latency_s: of each request, in the order of arrival, float64 ``[n]``.
        decided_s: when migrations were decided.
        in_force_s: when they were in force.
        local_part: of choices, those of experts at their own site: of each step, float64.
        step_s: seconds of a step.
    """

    outcome: EdgeOutcome
    latency_s: Floats
    decided_s: tuple[float, ...]
    in_force_s: tuple[float, ...]
    local_part: Floats
    step_s: float


def run_migrating(
    fleet: EdgeFleet,
    costs: EdgeCosts,
    routing: TaskRouting,
    workload: EdgeWorkload,
    plan: EdgePlan,
    terms: ReplacingTerms,
    advance: Advance = reference,
    step_s: float = 30.0,
) -> MigratingOutcome:
    """Simulate until all requests are answered, and decide about placements meanwhile.

    Every site reports its routing once a step. Demand fades, a shift of a site's routing drops what was before it,
    and decisions wait for new data then (``OriginTraffic``). Until experts have moved, every link has only the rest
    of its rate, and the old placement stays in force.

    Args:
        fleet: sites.
        costs: of layers and messages.
        routing: passes that requests are made of.
        workload: requests.
        plan: the first placement.
        terms: of decisions.
        advance: what carries out events.
        step_s: between reports, and of the local parts that are told.
    """
    state = EdgeState.of(fleet, costs, routing, workload, plan.holder.copy(), count_demand=True)
    deciding = _Deciding(state, fleet, plan.held, terms)
    end_s, now_s = float(workload.at_s[-1]), 0.0
    local_parts, before = list[float](), np.zeros(2)
    while now_s < end_s:
        now_s += step_s
        due_s = deciding.due_s
        while due_s <= now_s:
            advance(state, due_s)
            deciding.act(due_s)
            due_s = deciding.due_s
        advance(state, now_s)
        deciding.report(now_s, step_s)
        counted = np.array([state.local.sum(), state.remote.sum()], float)
        new, before = counted - before, counted
        local_parts.append(float(new[0] / new.sum()) if new.sum() else np.nan)
    advance(state, np.inf)
    return MigratingOutcome(
        EdgeOutcome.of(state),
        state.end_s - state.at_s,
        tuple(deciding.decided_s),
        tuple(deciding.in_force_s),
        np.array(local_parts),
        step_s,
    )


class _Deciding:
    """Decisions about one state, and the migration that is under way."""

    def __init__(
        self, state: EdgeState, fleet: EdgeFleet, held: Held, terms: ReplacingTerms
    ) -> None:
        self._state, self._fleet, self._held, self._terms = state, fleet, held, terms
        self._origins = [f"site-{n}" for n in range(fleet.num_sites)]
        layers = range(state.num_layers)
        self._traffic = OriginTraffic(state.num_experts, layers, HALF_LIFE_S)
        self._next_s, self._reported_s = terms.interval_s, 0.0
        self._moving: tuple[float, EdgePlan] | None = None
        self._seen, self._before = state.demand.copy(), self._counts()
        self.decided_s, self.in_force_s = list[float](), list[float]()

    @property
    def due_s(self) -> float:
        """Time of the next action."""
        return self._next_s if self._moving is None else self._moving[0]

    def report(self, now_s: float, window_s: float) -> None:
        """Tell what every site has routed since its last report."""
        new = (self._state.demand - self._seen).astype(np.int64)
        self._seen, self._reported_s = self._state.demand.copy(), now_s
        for origin, counts in zip(self._origins, new, strict=True):
            if counts.any():
                self._traffic.add(self._window(origin, counts, window_s), now_s)

    def _window(self, origin: str, counts: NDArray[np.int64], window_s: float) -> ActivationWindow:
        num_experts = self._state.num_experts
        return ActivationWindow(
            worker_id=origin,
            generation=0,
            model_digest="",
            num_experts=num_experts,
            epoch=0,
            window_s=window_s,
            layers=[
                LayerActivations(
                    layer=layer,
                    rows=int(tokens.sum()) // self._state.top_k,
                    batches=1,
                    tokens=tokens.tolist(),
                    active_batches=(tokens > 0).astype(int).tolist(),
                )
                for layer, tokens in enumerate(counts)
                if tokens.any()
            ],
        )

    def act(self, now_s: float) -> None:
        """Put a migration in force that is through, or decide about the next."""
        if self._moving is not None:
            self._held = self._moving[1].held
            self._state.holder[:] = self._moving[1].holder
            self._state.byte_s[:] = self._fleet.byte_s
            self._moving = None
            self.in_force_s.append(now_s)
            self._next_s = max(self._next_s, now_s)
            return
        if self._traffic.settling(self._reported_s):
            self._next_s = now_s + SETTLING_S
            return
        self._next_s = now_s + self._terms.interval_s
        demand = self._traffic.demand(self._origins, self._reported_s)
        if not demand.any():
            return
        plan = place(self._terms.policy, self._fleet, demand, self._held)
        verdict = self._verdict(plan, demand, now_s)
        if verdict.pays:
            self._moving = now_s + verdict.transfer_s, plan
            self._state.byte_s[:] = self._fleet.byte_s / (1 - LOAD_SHARE)
            self.decided_s.append(now_s)

    def _counts(self) -> dict[str, Floats]:
        names = "local", "remote", "local_s", "remote_s"
        return {name: getattr(self._state, name).astype(np.float64) for name in names}

    def _verdict(self, plan: EdgePlan, demand: Floats, now_s: float) -> MigrationVerdict:
        counts = self._counts()
        since = {name: counts[name] - self._before[name] for name in counts}
        self._before = counts
        under_way = (self._state.at_s < now_s) & ~(self._state.end_s < now_s)
        case = MigrationCase(
            origins=self._origins,
            demand=demand,
            remote_s=since["remote_s"] / np.maximum(since["remote"], 1),
            local_s=since["local_s"] / np.maximum(since["local"], 1),
            bytes_per_s=np.full(self._fleet.num_sites, 1 / self._fleet.byte_s),
            load_share=LOAD_SHARE,
            expert_bytes=self._terms.expert_bytes,
            slowdown=LOAD_SHARE
            / (1 - LOAD_SHARE),  # at most: were all of a request's time on links
            busy_s_per_s=float(under_way.sum()),
            interval_s=self._terms.interval_s,
            least_gain=LEAST_GAIN,
        )
        held, wanted = (_document(self._origins, each) for each in (self._held, plan.held))
        return case.verdict(held, wanted)


def _document(origins: Sequence[str], held: Held) -> Placement:
    _, num_layers, num_experts = held.shape
    return Placement(
        epoch=0,
        model_digest="",
        num_experts=num_experts,
        workers=[
            PlacedWorker(worker_id=each, generation=0, admin_address="", data_address="")
            for each in origins
        ],
        layers=list(range(num_layers)),
        slots=slots_of(held),
    )
