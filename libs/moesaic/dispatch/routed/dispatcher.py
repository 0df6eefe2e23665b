"""``routed``: rows go to the expert workers, which gate them and send partial sums back.

Rows go directly, from every attention worker to every expert worker that may serve an expert of the
layer, or in two phases (``use``). The gate runs on the expert side, so a request
carries the hidden states once and no routing (JANUS section 3.3).

Expert workers also choose among replicas, so all must decide alike: each reply carries a digest of
the decision. If two digests differ, the layer is asked again with this side's own routing.

Where the model is on a GPU and so are all workers of a layer, many rows leave from where they are, and sums
arrive there (``transport.wire``). The device is waited for once a layer: UCX may read the rows only
when kernels have written them. Kernels that are started later, as of a shared expert, are not waited
for. The sums are added up by kernels that nobody waits for. Otherwise rows are copied to the host, and
the sums back.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moesaic.costs import CostBook
from moesaic.dispatch.contract import Step
from moesaic.dispatch.expert_waits import Work
from moesaic.dispatch.route import Route
from moesaic.dispatch.routed.asking import (
    AskedBatch,
    Begun,
    Outcome,
    PythonAsking,
    RoutedStep,
    Sum,
)
from moesaic.dispatch.routed.native import NativeAsking
from moesaic.dispatch.routed.notes import DispatchNotes
from moesaic.dispatch.routed.routes import Routes
from moesaic.dispatch.routed.tally import RouteTally
from moesaic.dispatch.sum_order import combine
from moesaic.dispatch.two_phase.dispatcher import TwoPhaseDispatcher
from moesaic.errors import ExpertUnavailable, MoesaicError, NotReady, StaleEpoch
from moesaic.experts.brownout.logical import SubstitutionOf
from moesaic.experts.frames import decision_of, degraded_in, is_partial_sum, is_unsummed
from moesaic.experts.unsummed import add_up_choices, rows_at_once
from moesaic.experts.wire_rows import from_wire
from moesaic.kernels.brownout import split_choices
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.messages.wire import WireDtype
from moesaic.models.layers.gate import Gate
from moesaic.transport.contract import Link, Network
from moesaic.transport.device_memory import to_device
from moesaic.transport.frame import Frame

LINKING_SHARE = 0.1  # of the time of steps, while peers are being linked
LINKING_LEAST_S = 0.002


class RoutedDispatcher:
    """Sends each layer's rows to the placed expert workers, and keeps links to them."""

    def __init__(
        self,
        network: Network,
        gates: dict[int, Gate],
        timeout_s: float,
        scheduling: ExpertScheduling = "aebs",
        *,
        deterministic: bool = False,
        wire: WireDtype = "own",
        substitution_of: SubstitutionOf | None = None,
        node: str = "",
    ) -> None:
        """Use ``network`` for tensors.

        Args:
            network: network of this engine thread.
            gates: gates by decoder layer; used only if expert workers disagree, or ``deterministic``.
            timeout_s: longest wait for one layer's replies to a batch of up to 512 rows.
            scheduling: how expert workers choose among replicas.
            deterministic: sums have the bits of ``local``, wherever experts are; see ``unsummed``.
            wire: form in which rows and sums travel, unless ``deterministic``.
            substitution_of: describes how a layer is degraded, for ``deterministic``; None: steps have no substitution.
            node: node that this side is on.
        """
        self._network, self._gates, self._substitution_of = network, gates, substitution_of
        self._deterministic, self._wire = deterministic, wire
        self.native = NativeAsking(network, timeout_s, wire)
        self._python = PythonAsking(network, self.native.patience_s)
        self._routes = Routes(network, scheduling, stands_in=not deterministic)
        self._two_phase: TwoPhaseDispatcher | None = None
        self._notes, self.waits = DispatchNotes(), RouteTally(node)
        self._work = Work()  # as replies say that Python reads

    @property
    def costs(self) -> CostBook:
        """Costs of links, as far as somebody measures them."""
        return self._two_phase.pings.book if self._two_phase is not None else CostBook()

    @property
    def network(self) -> Network:
        """The network that frames travel by."""
        return self._network

    def take_work(self) -> Work:
        """See ``TellsOfWork``."""
        work, self._work = self._work, Work()
        self.native.take_work(work)
        return work

    def use(self, two_phase: TwoPhaseDispatcher) -> None:
        """Let ``two_phase`` decide from now on how rows travel."""
        self._two_phase = two_phase

    def set_placement(self, placement: Placement) -> None:
        """Learn a committed placement.

        Steps use it that begin once its workers are linked. Workers that it leaves out lose their
        link when no step uses them any more.
        """
        self._routes.set_placement(placement)

    def route_of(self, epoch: int) -> Route | None:
        """The route of an epoch, if steps that begin now would use it."""
        route = self._routes.current
        return route if route is not None and route.placement.epoch == epoch else None

    @property
    def waiting_for(self) -> list[str]:
        """See ``Dispatcher.waiting_for``."""
        return self._routes.waiting_for

    @property
    def epoch(self) -> int:
        """The epoch that the next step would pin; 0 if none can be."""
        route = self._routes.current
        return route.placement.epoch if route else 0

    def begin_step(self) -> RoutedStep:
        """See ``Dispatcher.begin_step``."""
        route = self._routes.current
        if route is None:
            raise NotReady(f"waiting for {'; '.join(self.waiting_for)}", code="expert_unavailable")
        has_no_substitution = self._deterministic and self._substitution_of is None
        step = RoutedStep(
            os.urandom(16),
            route.placement.epoch,
            substitution=None if has_no_substitution else route.substitution,
            has_lost=route.has_lost,
            placed_in=route.placement.traceparent,
            route=route,
        )
        self._routes.pin(step.step_id, route.placement)
        return step

    def end_step(self, step: Step) -> None:
        """See ``Dispatcher.end_step``."""
        self._routes.unpin(step.step_id)

    async def reachable(self) -> None:
        """See ``Dispatcher.reachable``."""
        await self._routes.reachable()

    async def link_peers(self, after_s: float) -> None:
        """Let handshakes in progress continue, for a part of the time ``after_s`` since the last such pause.

        Steps leave the event loop a turn each, and a handshake takes some twenty.
        """
        if self._network.linking:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(LINKING_LEAST_S, LINKING_SHARE * after_s)):
                    await self._network.linked()

    def goes_directly(self, route: Route, layers: Iterable[int], *, promised: bool = False) -> bool:
        """True if all rows of these layers go from here to the workers, which send sums back.

        Rows with promises do. They are counted.
        """
        if self._deterministic:
            return False
        if self._two_phase is not None:
            if not promised and not self._two_phase.goes_directly(route, layers):
                return False
            self._two_phase.count_directly(route, layers)
        return True

    def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Awaitable[Tensor]:
        """See ``Dispatcher.dispatch``.

        Where that takes no Python, rows are sent before this returns. Rows with promises go directly.
        """
        assert isinstance(step, RoutedStep)
        if self.goes_directly(step.route, (layer,), promised=promised is not None):
            return self._directly(step, layer, hidden_states, promised)
        return self._indirectly(step, layer, hidden_states, promised)

    async def _indirectly(
        self, step: RoutedStep, layer: int, hidden_states: Tensor, promised: PromisedRows | None
    ) -> Tensor:
        started, counted = time.perf_counter(), self.waits.num
        if self._two_phase is None or self._deterministic:
            combined = await self._one_by_one(step, layer, hidden_states, promised)
        else:
            direct = partial(self._directly, step, layer, hidden_states)
            combined = await self._two_phase.dispatch(step.route, layer, hidden_states, direct)
        # Else they went directly after all.
        if self.waits.num == counted:
            self.waits.count(step.route, layer, hidden_states.nbytes, started)
        return to_device(combined, hidden_states.device).to(hidden_states.dtype)

    def _directly(
        self,
        step: RoutedStep,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Awaitable[Tensor]:
        parcels = step.route.takes_from(hidden_states.device, layer, hidden_states.nbytes)
        rows = hidden_states if parcels else hidden_states.cpu()
        batch = AskedBatch(layer, rows, self._wire, promised, parcels=parcels)
        return self._end(step, batch, self._begin(step, batch), hidden_states)

    def _begin(self, step: RoutedStep, batch: AskedBatch) -> Begun:
        """Send a batch: in C if that is possible, else in Python."""
        return self.native.begin(step, batch) or self._python.begin(step, batch)

    async def _end(
        self, step: RoutedStep, batch: AskedBatch, begun: Begun, hidden_states: Tensor
    ) -> Tensor:
        """The sum of a batch that has begun, where its rows ``hidden_states`` were."""
        started = time.perf_counter()
        found = await self._settle(step, batch, begun, hidden_states)
        self.waits.count(step.route, batch.layer, batch.rows.nbytes, started, found.slowest_s)
        return to_device(found.rows, hidden_states.device).to(hidden_states.dtype)

    async def _settle(
        self, step: RoutedStep, batch: AskedBatch, begun: Begun, hidden_states: Tensor
    ) -> Sum:
        """Wait for the sum of a batch, and ask again if the workers decided differently."""
        found = await begun.settle()
        if isinstance(found, Sum):
            await self.link_peers(0)
            return found
        replies = self._read(step, batch, found)
        if _differ(replies):
            replies = await self._overrule(step, batch, replies, hidden_states)
        if batch.promised is not None:
            batch.promised.note(degraded_in(replies[0]))
        parts = [from_wire(reply.tensors[0]) for reply in replies]
        by_worker = dict(zip(step.route.targets[batch.layer], parts, strict=True))
        total = combine(step.route.placement.workers, by_worker, len(batch.rows))
        return Sum(total, max(reply.took_ns for reply in replies) * 1e-9)

    async def _overrule(
        self, step: RoutedStep, batch: AskedBatch, replies: Sequence[Frame], hidden_states: Tensor
    ) -> list[Frame]:
        """Ask again with this side's own routing of the rows, as the workers have seen them."""
        digests = [decision_of(reply) for reply in replies]
        self._notes.divergence(step, batch.layer, digests)
        seen = hidden_states
        if batch.wire != "own":
            seen = from_wire(batch.packed).to(seen)
        weights, ids = self._gates[batch.layer](seen)
        told = await self._ask(step, replace(batch, routing=(weights.cpu(), ids.cpu())))
        # Not over the gate, then.
        if _differ(told):
            raise ExpertUnavailable(batch.layer, cause="its workers hold different placements")
        return told

    async def _one_by_one(
        self, step: RoutedStep, layer: int, hidden_states: Tensor, promised: PromisedRows | None
    ) -> Tensor:
        """The same bits as ``local``: results of a row's experts come here one by one."""
        topk_weights, topk_ids = self._gates[layer](hidden_states)
        if promised is not None:
            # Or nobody would have promised anything.
            assert step.route.substitution is not None
            assert self._substitution_of is not None
            substitution = self._substitution_of(layer, step.route.substitution, None, None)
            split_choices(topk_ids, topk_weights, promised, substitution)
        whole = hidden_states.cpu(), topk_weights.cpu(), topk_ids.cpu()
        at_once, sums = rows_at_once(topk_ids.shape[1]), []
        for start in range(0, len(topk_ids), at_once):
            rows, weights, ids = (tensor[start : start + at_once] for tensor in whole)
            batch = AskedBatch(layer, rows, routing=(weights, ids), unsummed=True)
            sums.append(add_up_choices(layer, await self._ask(step, batch), weights, ids))
        return torch.cat(sums)

    async def _ask(self, step: RoutedStep, batch: AskedBatch) -> list[Frame]:
        """Ask in Python; the replies in the order of ``Route.targets``."""
        return self._read(step, batch, await self._python.begin(step, batch).settle())

    def _read(
        self, step: RoutedStep, batch: AskedBatch, outcomes: Sequence[Outcome]
    ) -> list[Frame]:
        """Check the outcomes of an exchange, in the order of ``Route.targets``."""
        layer, route = batch.layer, step.route
        links = [route.links[idx] for idx in route.targets[layer]]
        replies: list[Frame] = []
        for link, outcome in zip(links, outcomes, strict=True):
            if isinstance(outcome, MoesaicError):
                raise self.failure(step, layer, link, outcome)
            if not (
                is_unsummed(outcome, batch.rows.shape[1])
                if batch.unsummed
                else is_partial_sum(outcome, batch.packed, promised=batch.promised is not None)
            ):
                link.discard("reply has another shape")
                raise ExpertUnavailable(layer, cause=f"{link.peer}: reply has another shape")
            replies.append(outcome)
        for idx, reply in zip(route.targets[layer], replies, strict=True):
            self._work.add(route.placement.workers[idx].worker_id, reply.took_ns)
        return replies

    def failure(self, step: Step, layer: int, link: Link, cause: MoesaicError) -> MoesaicError:
        """Record an exchange that failed on ``link``.

        Returns:
            The error of the step.
        """
        if isinstance(cause, StaleEpoch):
            self._notes.refusal(link.peer, step.epoch, cause)
            return cause
        self._routes.plan_anew()
        self._notes.failure(step, layer, link.peer, cause)
        error = ExpertUnavailable(layer, cause=f"{link.peer}: {cause.code}")
        error.__cause__ = cause
        return error

    async def close(self) -> None:
        """Stop dialling and drop all links."""
        if self._two_phase is not None:
            await self._two_phase.close()
        await self._routes.close()


def _differ(replies: Sequence[Frame]) -> bool:
    """True if workers decided differently about the same rows."""
    return len({decision_of(reply) for reply in replies}) > 1
