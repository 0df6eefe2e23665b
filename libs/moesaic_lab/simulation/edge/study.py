"""One point of the edge study: a fleet, a placement and a workload in, latencies and shares out."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from moesaic.placement.traffic.statistics import Floats
from moesaic_lab.simulation.edge.costs import EdgeCosts
from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.reference import advance as reference
from moesaic_lab.simulation.edge.routing import Ints, TaskRouting
from moesaic_lab.simulation.edge.state import Advance, EdgeState
from moesaic_lab.simulation.edge.workload import EdgeWorkload


@dataclass(frozen=True, kw_only=True)
class EdgeOutcome:
    """Figures of one run.

    Attributes:
        requests: that were answered, all that came.
        events: that were simulated.
        mean_s, p50_s, p90_s: from a request's arrival to its last answer.
        mean_first_s: to its first answer.
        mean_wait_s: until a GPU took it into its passes.
        remote_part: of choices, those of experts elsewhere.
        messages_per_token: to other sites.
        gpu_part, link_part: of the time until the last answer, in which GPUs and links were in use.
    """

    requests: int
    events: int
    mean_s: float
    p50_s: float
    p90_s: float
    mean_first_s: float
    mean_wait_s: float
    remote_part: float
    messages_per_token: float
    gpu_part: float
    link_part: float

    @classmethod
    def of(cls, state: EdgeState) -> Self:
        """Sum up a state in which all is done."""
        latency_s = state.end_s - state.at_s
        choices = int(state.local.sum() + state.remote.sum())
        tokens = choices / state.top_k / state.num_layers
        span_s = float(state.end_s.max(initial=0.0)) or 1.0
        p50_s, p90_s = np.quantile(latency_s, [0.5, 0.9]) if len(latency_s) else (0.0, 0.0)
        return cls(
            requests=len(latency_s),
            events=state.num_events,
            mean_s=_mean(latency_s),
            p50_s=float(p50_s),
            p90_s=float(p90_s),
            mean_first_s=_mean(state.first_s - state.at_s),
            mean_wait_s=_mean(state.begun_s - state.at_s),
            remote_part=float(state.remote.sum()) / max(choices, 1),
            messages_per_token=float(state.messages.sum()) / max(tokens, 1e-9),
            gpu_part=float(state.gpu_busy_s.sum()) / state.num_gpus / span_s,
            link_part=float(state.link_busy_s.mean()) / span_s,
        )


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def run(
    fleet: EdgeFleet,
    costs: EdgeCosts,
    routing: TaskRouting,
    workload: EdgeWorkload,
    holder: Ints,
    advance: Advance = reference,
) -> EdgeOutcome:
    """Simulate until all requests are answered.

    Args:
        fleet: sites.
        costs: of layers and messages.
        routing: passes that requests are made of.
        workload: requests.
        holder: int32 ``[N, L, E]``, see ``EdgePlan``.
        advance: what carries out events; ``moesaic_lab.simulation.edge.native.advancer()`` has a fast one.
    """
    state = EdgeState.of(fleet, costs, routing, workload, holder)
    advance(state, np.inf)
    return EdgeOutcome.of(state)
