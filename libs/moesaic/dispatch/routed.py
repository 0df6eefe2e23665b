"""``routed``: rows go to the expert workers, which gate them, compute their shares, and send
partial sums back.

Rows go directly, every attention worker to every expert worker that may serve an expert of the
layer, unless an ``AdaptiveExchange`` finds a faster way.
The gate runs on the expert side, so a request frame carries the hidden states once and no routing
(JANUS section 3.3); so does the choice among replicas, for which the frame says by which policy it
is made, who lives and what they still have to do. That is only right if all workers decide alike:
each reply carries a digest of what it decided, and if two differ the layer is asked again with this
side's own choice of experts in the frame.

Where several batches are under way at once, the later ones are shared out with regard to the
earlier: their workers are taken to be still busy with what they mostly have of that layer. (Of what
a batch under way really is nothing is known here before its first reply. And the last batch alone
says too little: it turned away from those that the one before it had filled.)
"""

import asyncio
import itertools
import os
from functools import partial

import structlog
import torch
from prometheus_client import Counter
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.exchange.adaptive import AdaptiveExchange
from moesaic.dispatch.exchange.order import combine
from moesaic.dispatch.route import Route, plan_route
from moesaic.dispatch.unsummed import UNSUMMED, add_up_choices, is_unsummed, rows_at_once
from moesaic.dispatch.worker_links import WorkerLinks
from moesaic.errors import ExpertUnavailable, MoesaicError, NotReady, StaleEpoch
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.models.gate import Gate
from moesaic.transport.contract import Network
from moesaic.transport.frame import Frame, FrameKind

log = structlog.get_logger()

DIVERGENCES = Counter(
    "moesaic_gate_divergence_total",
    "Layers whose expert workers decided differently about the same rows",
)
ROWS_PER_TIMEOUT = 512  # a larger batch may take longer, in proportion


class RoutedDispatcher:
    """Keeps links to the placed expert workers and sends each layer's rows to them."""

    def __init__(
        self,
        network: Network,
        gates: dict[int, Gate],
        timeout_s: float,
        scheduling: ExpertScheduling = "aebs",
        *,
        deterministic: bool = False,
    ) -> None:
        """Use ``network`` for tensors.

        Args:
            network: of this engine thread.
            gates: by decoder layer; asked only if expert workers disagree, or ``deterministic``.
            timeout_s: longest wait for one layer's replies to a batch of up to 512 rows.
            scheduling: how expert workers choose among replicas.
            deterministic: sums have the bits of ``local``, wherever experts are; see ``unsummed``.
        """
        self._network, self._gates, self._timeout_s = network, gates, timeout_s
        self._scheduling: ExpertScheduling = scheduling
        self._deterministic = deterministic
        self._newest: Placement | None = None  # what to switch to
        self._in_use: Placement | None = None  # what serves until the newest can
        self._pinned: dict[bytes, Placement] = {}  # by steps that have not ended
        self._links = WorkerLinks(network, self._plan_anew)
        self._route: Route | None = None
        self._changed = asyncio.Event()
        self._seq = itertools.count(1)
        self._exchange: AdaptiveExchange | None = None
        self._refused = "", 0  # the last peer that did not know an epoch, and which

    @property
    def network(self) -> Network:
        """That frames travel by."""
        return self._network

    def use(self, exchange: AdaptiveExchange) -> None:
        """Let ``exchange`` decide how rows travel from now on, not always directly."""
        self._exchange = exchange

    def route_of(self, epoch: int) -> Route | None:
        """What of this epoch's placement can be reached, if steps that begin now would use it."""
        route = self._current_route()
        return route if route is not None and route.placement.epoch == epoch else None

    def set_placement(self, placement: Placement) -> None:
        """Learn a committed placement. Steps that begin once its workers are linked use it; workers
        that it leaves out lose their link when no step uses them any more."""
        if self._newest is None or placement.epoch > self._newest.epoch:
            self._newest = placement
            self._current_route()  # now: an idle engine begins no step that would

    @property
    def waiting_for(self) -> list[str]:
        """See ``Dispatcher.waiting_for``."""
        if self._newest is None:
            return ["a placement from the scheduler"]
        if self._current_route() is not None:
            return []
        unlinked = [w.worker_id for w in self._newest.workers if self._links.get(w) is None]
        return [f"expert workers of epoch {self._newest.epoch}: {', '.join(unlinked)}"]

    @property
    def epoch(self) -> int:
        """The epoch that the next step would pin; 0 if none can be."""
        route = self._current_route()
        return route.placement.epoch if route else 0

    def begin_step(self) -> Step:
        """See ``Dispatcher.begin_step``."""
        route = self._current_route()
        if route is None:
            raise NotReady(f"waiting for {'; '.join(self.waiting_for)}", code="expert_unavailable")
        step = Step(os.urandom(16), route.placement.epoch, route)
        self._pinned[step.step_id] = route.placement
        return step

    def end_step(self, step: Step) -> None:
        """See ``Dispatcher.end_step``."""
        if self._pinned.pop(step.step_id, None) is not self._in_use:
            self._refresh()

    async def reachable(self) -> None:
        """See ``Dispatcher.reachable``."""
        while self._current_route() is None:
            self._changed.clear()
            await self._changed.wait()

    async def dispatch(self, step: Step, layer: int, hidden_states: Tensor) -> Tensor:
        """See ``Dispatcher.dispatch``. Batches of one step may be under way together."""
        route: Route = step.route
        direct = partial(self._directly, step, layer, hidden_states)
        if self._deterministic:
            combined = await self._one_by_one(step, layer, hidden_states)
        elif self._exchange is None:
            combined = await direct()
        else:  # rows of several workers go together: none of them says what it has under way
            combined = await self._exchange.dispatch(
                route, layer, hidden_states.cpu(), direct, step.step_id
            )
        return combined.to(hidden_states.device, hidden_states.dtype)

    async def _directly(self, step: Step, layer: int, hidden_states: Tensor) -> Tensor:
        route: Route = step.route
        rows = hidden_states.cpu()
        with route.batch(layer) as terms:
            replies = await self._ask(step, layer, [rows, terms])
            if len({reply.digest for reply in replies}) > 1:
                DIVERGENCES.inc()
                log.warning(
                    "gate.diverged",
                    layer=layer,
                    epoch=step.epoch,
                    digests=[hex(r.digest) for r in replies],
                )
                topk_weights, topk_ids = self._gates[layer](hidden_states)
                routing = [topk_weights.cpu(), topk_ids.cpu()]
                replies = await self._ask(step, layer, [rows, terms, *routing])
                if len({reply.digest for reply in replies}) > 1:  # not over the gate, then
                    raise ExpertUnavailable(layer, cause="its workers hold different placements")
            route.learn(layer, terms, replies)
        parts = [reply.tensors[0] for reply in replies]
        by_worker = dict(zip(route.targets[layer], parts, strict=True))
        return combine(route.placement.workers, by_worker, len(rows))

    async def _one_by_one(self, step: Step, layer: int, hidden_states: Tensor) -> Tensor:
        """The bits of ``local``: what each of a row's experts gives comes here by itself."""
        route: Route = step.route
        topk_weights, topk_ids = self._gates[layer](hidden_states)
        whole = hidden_states.cpu(), topk_weights.cpu(), topk_ids.cpu()
        at_once, sums = rows_at_once(topk_ids.shape[1]), []
        for start in range(0, len(topk_ids), at_once):
            rows, weights, ids = (tensor[start : start + at_once] for tensor in whole)
            asked = [rows, route.terms_of(layer), weights, ids]
            replies = await self._ask(step, layer, asked, UNSUMMED)
            sums.append(add_up_choices(layer, replies, weights, ids))
        return torch.cat(sums)

    async def _ask(
        self, step: Step, layer: int, tensors: list[Tensor], flags: int = 0
    ) -> list[Frame]:
        route: Route = step.route
        calls = [
            (
                route.links[idx],
                Frame(
                    kind=FrameKind.REQUEST,
                    request_id=step.step_id,
                    epoch=step.epoch,
                    layer=layer,
                    seq=next(self._seq),
                    flags=flags,
                    tensors=list(tensors),
                ),
            )
            for idx in route.targets[layer]
        ]
        patience_s = self._timeout_s * max(1.0, len(tensors[0]) / ROWS_PER_TIMEOUT)
        outcomes = await self._network.exchange(calls, patience_s)
        replies: list[Frame] = []
        for (link, _), outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, StaleEpoch):
                self._note_refusal(link.peer, step.epoch, outcome)
                raise outcome
            if isinstance(outcome, MoesaicError):
                self._route = None
                self._refresh()
                log.warning(
                    "expert_worker.failed",
                    peer=link.peer,
                    layer=layer,
                    epoch=step.epoch,
                    cause=str(outcome),
                )
                raise ExpertUnavailable(layer, cause=f"{link.peer}: {outcome.code}") from outcome
            if not (
                is_unsummed(outcome, tensors[0].shape[1])
                if flags & UNSUMMED
                else _answers(outcome, tensors, len(route.placement.workers))
            ):
                link.discard("reply has another shape")
                raise ExpertUnavailable(layer, cause=f"{link.peer}: reply has another shape")
            replies.append(outcome)
        return replies

    def _note_refusal(self, peer: str, epoch: int, cause: StaleEpoch) -> None:
        """Say so once: without Redis, steps may go on asking for an epoch that is no more."""
        if self._refused != (peer, epoch):
            self._refused = peer, epoch
            log.warning("step.refused", peer=peer, epoch=epoch, cause=str(cause))

    def _current_route(self) -> Route | None:
        """The route of the newest placement that can be served; kept until a link or the placement
        changes."""
        route = self._route
        if route and route.placement is self._newest and route.usable:
            return route
        self._route = None
        for placement in self._known_placements():
            links = {
                idx: link
                for idx, w in enumerate(placement.workers)
                if (link := self._links.get(w)) is not None
            }
            route = plan_route(placement, links, self._scheduling)
            if route is not None:
                if self._in_use is not placement:
                    log.info("route.switched", epoch=placement.epoch, workers=len(route.live))
                self._route, self._in_use = route, placement
                break
        self._refresh()
        return self._route

    def _known_placements(self) -> list[Placement]:
        known = [p for p in (self._newest, self._in_use) if p is not None]
        return known[:1] if len(known) == 2 and known[0] is known[1] else known

    def _refresh(self) -> None:
        """Dial what is placed; drop links to others, but not one that a step has pinned: losing it
        would fail the step."""
        self._links.keep(
            [worker for placement in self._known_placements() for worker in placement.workers],
            [worker for placement in self._pinned.values() for worker in placement.workers],
        )

    def _plan_anew(self) -> None:
        """With one worker more, also if no step is about to begin."""
        self._route = None
        self._current_route()
        self._changed.set()

    async def close(self) -> None:
        """Stop dialling and drop all links."""
        if self._exchange is not None:
            await self._exchange.close()
        await self._links.close()


def _answers(reply: Frame, request: list[Tensor], num_workers: int) -> bool:
    """Whether a reply has the tensors that ``request`` asks for: a partial sum of all rows, or of
    none; and what each worker has to do, if the terms have loads."""
    rows, terms = request[:2]
    shapes = [list(tensor.shape) for tensor in reply.tensors]
    loads = [[1, num_workers]] if len(terms) > 1 else []
    return shapes in ([list(rows.shape), *loads], [[0, rows.shape[1]], *loads])
