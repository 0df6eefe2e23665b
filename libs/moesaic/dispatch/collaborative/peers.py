"""The other sites of a placement: links to them, what they cost, and asking them."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog
from torch import Tensor

from moesaic.dispatch.collaborative import metrics
from moesaic.dispatch.collaborative.costs import LinkProfile, PeerCosts
from moesaic.dispatch.collaborative.view import SiteView
from moesaic.dispatch.contract import Step
from moesaic.dispatch.links import DialledLinks, Endpoint, LinkEvents
from moesaic.errors import ExpertUnavailable, MoesaicError
from moesaic.experts.frames import is_partial_sum, is_unsummed, layer_request
from moesaic.telemetry.metrics import series
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame
from moesaic.transport.probing import measure_round_trip

log = structlog.get_logger()

EVENTS = LinkEvents("site.linked", "site.unreachable")
PROBE_EVERY_S = 5.0
SMALL_PROBES = 3
LEAST_PATIENCE_S = 0.5  # even if a peer usually answers at once
USUAL_TIMES = 8  # as long as predicted may an answer take before another source is asked
FAILED_REST_S = 1.0  # a peer that refused is asked again after this long


@dataclass(frozen=True)
class PeerAsk:
    """Rows for one peer.

    Attributes:
        peer: index of the peer in the placement.
        rows: ``[t, H]``, as they travel.
        weights: float32 ``[t, k]``.
        ids: int32 ``[t, k]``, -1 for choices that are not its.
        row_bytes: bytes of a row and its sum together.
        unsummed: results of choices are returned one by one.
    """

    peer: int
    rows: Tensor
    weights: Tensor
    ids: Tensor
    row_bytes: int
    unsummed: bool = False


class Peers:
    """The other sites, on the engine's event loop; costs outlive links and placements."""

    def __init__(self, network: Network, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` for one answer to up to 512 rows."""
        self._network, self._timeout_s = network, timeout_s
        self._links: DialledLinks[Endpoint] = DialledLinks(
            network, EVENTS, self._dialled, redial=True
        )
        self._news = asyncio.Event()
        self._costs: dict[str, PeerCosts] = {}
        self._rests_until_s: dict[str, float] = {}
        self._pinned: Counter[Endpoint] = Counter()
        self._current: tuple[Endpoint, ...] = ()
        self._seq = itertools.count(1)

    def follow(self, view: SiteView) -> None:
        """Keep links to the peers of a placement from now on, and to those that steps have pinned."""
        self._current = tuple(view.peers.values())
        self._links.keep(self._current, list(self._pinned))
        for endpoint in self._current:
            self._links.dial(endpoint)

    def pin(self, view: SiteView) -> None:
        """Keep the links of a step."""
        self._pinned.update(view.peers.values())

    def unpin(self, view: SiteView) -> None:
        """End what ``pin`` began."""
        self._pinned.subtract(view.peers.values())
        self._pinned = +self._pinned
        if any(endpoint not in self._current for endpoint in view.peers.values()):
            self._links.keep(self._current, list(self._pinned))

    def linked_to(self, view: SiteView) -> frozenset[int]:
        """Indices of the peers that have a link, even if they did not answer recently."""
        return frozenset(
            idx for idx, endpoint in view.peers.items() if self._links.get(endpoint) is not None
        )

    def live(self, view: SiteView) -> dict[int, LinkProfile]:
        """Costs of the peers that can be asked now, by index."""
        now_s = asyncio.get_running_loop().time()
        return {
            idx: self.costs(endpoint.worker_id).profile
            for idx, endpoint in view.peers.items()
            if self._links.get(endpoint) is not None
            and self._rests_until_s.get(endpoint.worker_id, 0.0) <= now_s
        }

    def costs(self, worker_id: str) -> PeerCosts:
        """Costs of a peer, learnt or still to be learnt."""
        return self._costs.setdefault(worker_id, PeerCosts())

    def profiles(self) -> Mapping[str, LinkProfile]:
        """Costs of the peers of the placement whose links have been probed, by worker id; for any thread."""
        known = {name: costs.profile for name, costs in list(self._costs.items()) if costs.probes}
        return {
            endpoint.worker_id: known[endpoint.worker_id]
            for endpoint in self._current
            if endpoint.worker_id in known and self._links.get(endpoint) is not None
        }

    async def linked(self, within_s: float) -> None:
        """Wait for a peer that is linked, or ``within_s``."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._news.wait()

    async def ask(
        self, step: Step, view: SiteView, layer: int, ask: PeerAsk
    ) -> Frame | MoesaicError:
        """Have a peer compute rows.

        Returns:
            Its reply, checked, or the reason why there is none.
        """
        endpoint = view.peers[ask.peer]
        link = self._links.get(endpoint)
        if link is None:
            return ExpertUnavailable(layer, cause=f"{endpoint.worker_id} cannot be reached")
        tensors = [ask.rows, view.basis_of(ask.peer), ask.weights, ask.ids]
        request = layer_request(
            step.step_id, step.epoch, layer, next(self._seq), tensors, unsummed=ask.unsummed
        )
        loop, costs = asyncio.get_running_loop(), self.costs(endpoint.worker_id)
        predicted_s = costs.profile.seconds(len(ask.rows), ask.row_bytes)
        started_s = loop.time()
        [outcome] = await self._network.exchange(
            [(link, request)], self._patience_s(len(ask.rows), predicted_s)
        )
        if isinstance(outcome, MoesaicError):
            self._failed(link, endpoint.worker_id, layer, step.epoch, outcome)
            return outcome
        if not _is_answer(outcome, ask):
            link.discard("reply has another shape")
            return ExpertUnavailable(layer, cause=f"{endpoint.worker_id}: reply has another shape")
        costs.exchanged(len(ask.rows), ask.row_bytes, loop.time() - started_s)
        series(metrics.REMOTE_CALLS, endpoint.worker_id).inc()
        return outcome

    async def probe(self) -> None:
        """Measure all links now and then, for ever."""
        while True:
            for endpoint in self._current:
                if (link := self._links.get(endpoint)) is not None:
                    with suppress(MoesaicError):
                        await self._probe(endpoint.worker_id, link)
            await asyncio.sleep(PROBE_EVERY_S)

    async def close(self) -> None:
        """Stop dialling and drop all links."""
        await self._links.close()

    def _dialled(self, _endpoint: Endpoint, link: Link | None) -> None:
        if link is not None:
            self._news.set()

    async def _probe(self, worker_id: str, link: Link) -> None:
        rtt_s, byte_s = await measure_round_trip(link, SMALL_PROBES, 1)
        costs = self.costs(worker_id)
        costs.probed(rtt_s, 1 / byte_s)
        series(metrics.LINK_RTT_S, worker_id).set(costs.profile.rtt_s)
        series(metrics.LINK_BYTES_PER_S, worker_id).set(costs.profile.bytes_per_s)
        series(metrics.PEER_ROW_S, worker_id).set(costs.profile.row_s)
        # From now on at 0, so that a first failure shows as an increase.
        series(metrics.FALLBACKS, worker_id)

    def _patience_s(self, num_rows: int, predicted_s: float) -> float:
        most_s = self._timeout_s * max(1.0, num_rows / 512)
        return min(most_s, max(LEAST_PATIENCE_S, USUAL_TIMES * predicted_s))

    def _failed(
        self, link: Link, worker_id: str, layer: int, epoch: int, cause: MoesaicError
    ) -> None:
        """Leave a peer alone for a while; its rows go elsewhere meanwhile."""
        series(metrics.FALLBACKS, worker_id).inc()
        now_s = asyncio.get_running_loop().time()
        if self._rests_until_s.get(worker_id, 0.0) <= now_s:
            log.warning("site.failed", peer=worker_id, layer=layer, epoch=epoch, cause=str(cause))
        # It refused: another epoch, or no memory.
        if link.alive:
            self._rests_until_s[worker_id] = now_s + FAILED_REST_S


def _is_answer(reply: Frame, ask: PeerAsk) -> bool:
    if ask.unsummed:
        return is_unsummed(reply, ask.rows.shape[1])
    # Each row has a choice that is the peer's, so it has none only under another placement.
    return is_partial_sum(reply, ask.rows) and len(reply.tensors[0]) == len(ask.rows)
