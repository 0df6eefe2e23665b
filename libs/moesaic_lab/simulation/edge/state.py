"""State of a simulated fleet: arrays that are advanced in time, by the reference or by what is written in C.

Events, in the order of time and, at one time, in the order in which they were planned:

============ ====================================================================================================
arrival      a request comes to a site; it waits there until a GPU takes it into its passes
``BEGIN``    a GPU begins a layer of its pass, or ends the pass
``DIVIDE``   attention and gate are done: experts here compute, rows of others leave as one message to each site
``ASK``      a message has come: its experts compute
``ANSWER``   they have, and the sums leave for where the rows came from
============ ====================================================================================================

GPUs of a site are one queue for whoever is free first; so is every site's link, on which its messages leave.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.placement.traffic.statistics import Floats
from moesaic_lab.simulation.edge.costs import EdgeCosts
from moesaic_lab.simulation.edge.fleet import EdgeFleet
from moesaic_lab.simulation.edge.routing import ANSWERS, Ints, TaskRouting
from moesaic_lab.simulation.edge.workload import EdgeWorkload

BEGIN, DIVIDE, ASK, ANSWER = range(4)
KINDS = 4  # an event's code is its GPU times this, and its kind
EVENT = np.dtype(
    [("at_s", "f8"), ("number", "i8"), ("sent", "f8")]
    + [(name, "i4") for name in ("code", "site", "choices", "experts")]
)
SIZE, NUMBER, ARRIVED, EVENTS = range(
    4
)  # of ``control``: the heap, events planned, arrivals, events
NOBODY = -1

Advance = Callable[["EdgeState", float], None]
"""Carries out all events before a time."""


@dataclass
class EdgeState:
    """Sites, GPUs and requests. C's ``struct edge_state`` has the same names.

    Attributes:
        num_sites, num_gpus, num_layers, num_experts, num_requests, top_k, running, num_answers: sizes; of the latter
            two the requests in one GPU's passes, and the answers that a request's are taken from.
        first_gpu: int32 ``[N + 1]``.
        site_of: of each GPU, int32 ``[G]``.
        holder: site that computes an expert for rows of another, int32 ``[N, L, E]``; its own where it holds it.
        offsets, experts, rows, tokens: passes; see ``TaskRouting``.
        at_s, site, prompt, answers, pool, start: requests; see ``EdgeWorkload``.
        costs: in the order of ``EdgeCosts``, float64 ``[9]``.
        byte_s: of each site's link, float64 ``[N]``.
        gpu_free_s, link_free_s: float64 ``[G]``, ``[N]``.
        gpu_busy_s, link_busy_s: float64 ``[N]``.
        members, num_members: requests in a GPU's passes, int32 ``[G, running]``, ``[G]``.
        layer, pending: of a GPU's pass, int32 ``[G]``: the next layer; answers to come.
        attention_s, done_s: of a GPU's pass, float64 ``[G]``: of each layer; when the last part of the layer is done.
        first_waiting, last_waiting: int32 ``[N]``; next_waiting: int32 ``[n]``.
        passes: that a request has behind it, int32 ``[n]``.
        begun_s, first_s, end_s: of a request's first pass, first answer and last, float64 ``[n]``; NaN before.
        local, remote, messages: choices served at their own site and elsewhere, and messages there, int64 ``[N]``.
        heap, control: events; see ``EVENT`` and ``SIZE``.
    """

    num_sites: int
    num_gpus: int
    num_layers: int
    num_experts: int
    num_requests: int
    top_k: int
    running: int
    num_answers: int
    first_gpu: Ints
    site_of: Ints
    holder: Ints
    offsets: NDArray[np.int64]
    experts: Ints
    rows: Ints
    tokens: Ints
    at_s: Floats
    site: Ints
    prompt: Ints
    answers: Ints
    pool: Ints
    start: Ints
    costs: Floats
    byte_s: Floats
    gpu_free_s: Floats
    link_free_s: Floats
    gpu_busy_s: Floats
    link_busy_s: Floats
    members: Ints
    num_members: Ints
    layer: Ints
    pending: Ints
    attention_s: Floats
    done_s: Floats
    first_waiting: Ints
    last_waiting: Ints
    next_waiting: Ints
    passes: Ints
    begun_s: Floats
    first_s: Floats
    end_s: Floats
    local: NDArray[np.int64]
    remote: NDArray[np.int64]
    messages: NDArray[np.int64]
    heap: NDArray[Any]
    control: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        fleet: EdgeFleet,
        costs: EdgeCosts,
        routing: TaskRouting,
        workload: EdgeWorkload,
        holder: Ints,
    ) -> "EdgeState":
        """Begin with idle sites, before the first arrival.

        Args:
            fleet: sites.
            costs: of layers and messages.
            routing: passes that requests are made of.
            workload: requests.
            holder: int32 ``[N, L, E]``, see ``placing.holders_of``; not copied.
        """
        n, g, r = fleet.num_sites, sum(fleet.gpus), len(workload)
        assert holder.shape == (n, routing.num_layers, routing.num_experts)
        assert holder.dtype == np.int32
        most_events = g * min(n, routing.num_experts) + g + 8

        def ints(*size: int, value: int = 0) -> Ints:
            return np.full(size, value, np.int32)

        return cls(
            num_sites=n,
            num_gpus=g,
            num_layers=routing.num_layers,
            num_experts=routing.num_experts,
            num_requests=r,
            top_k=routing.top_k,
            running=fleet.running,
            num_answers=ANSWERS // 2,
            first_gpu=np.concatenate([[0], np.cumsum(fleet.gpus)]).astype(np.int32),
            site_of=np.repeat(np.arange(n), fleet.gpus).astype(np.int32),
            holder=holder,
            offsets=routing.offsets,
            experts=routing.experts,
            rows=routing.rows,
            tokens=routing.tokens,
            at_s=workload.at_s,
            site=workload.site,
            prompt=workload.prompt,
            answers=workload.answers,
            pool=workload.pool,
            start=workload.start,
            costs=np.array([getattr(costs, name) for name in COST_NAMES]),
            byte_s=np.full(n, fleet.byte_s),
            gpu_free_s=np.zeros(g),
            link_free_s=np.zeros(n),
            gpu_busy_s=np.zeros(n),
            link_busy_s=np.zeros(n),
            members=ints(g, fleet.running),
            num_members=ints(g),
            layer=ints(g),
            pending=ints(g),
            attention_s=np.zeros(g),
            done_s=np.zeros(g),
            first_waiting=ints(n, value=NOBODY),
            last_waiting=ints(n, value=NOBODY),
            next_waiting=ints(r, value=NOBODY),
            passes=ints(r),
            begun_s=np.full(r, np.nan),
            first_s=np.full(r, np.nan),
            end_s=np.full(r, np.nan),
            local=np.zeros(n, np.int64),
            remote=np.zeros(n, np.int64),
            messages=np.zeros(n, np.int64),
            heap=np.zeros(most_events, EVENT),
            control=np.zeros(4, np.int64),
        )

    @property
    def num_events(self) -> int:
        """Events that were carried out."""
        return int(self.control[EVENTS])


COST_NAMES = (
    "layer_s",
    "row_s",
    "key_s",
    "experts_s",
    "expert_s",
    "choice_s",
    "hop_s",
    "message_s",
    "row_bytes",
)
