"""Loads experts from workers that hold them, before the checkpoint is read."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog
import torch
from prometheus_client import Counter
from torch import Tensor

from moesaic.errors import ExpertUnavailable, MoesaicError
from moesaic.experts.loaded import Bring, LoadedExpert
from moesaic.experts.pace import LoadPace
from moesaic.experts.pull.client import DamagedExpert, PullClient
from moesaic.experts.pull.frames import contents_digest
from moesaic.experts.pull.ranges import Share, messages_of
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.native.memory import huge_pages
from moesaic.telemetry.metrics import counter
from moesaic.transport.contract import Network
from moesaic.transport.device_memory import settle

log = structlog.get_logger()
T = TypeVar("T")

DIAL_TIMEOUT_S = 2.0
PIECE_TIMEOUT_S = 5.0

_pulls = counter(
    "moesaic_expert_pulls", "Experts requested from peers", "outcome", "ok", "failed", "damaged"
)
_pulled_bytes = Counter("moesaic_expert_pulled_bytes", "Bytes of experts received from peers")


class ExpertPeers:
    """Reaches other workers for their experts, on the event loop of ``network``: not the engine's."""

    def __init__(
        self,
        network: Network,
        worker_id: str,
        layout: ExpertLayout,
        model_digest: str,
        device: torch.device,
    ) -> None:
        """Make it on that event loop; experts are brought to ``device``."""
        self.layout, self.device = layout, device
        self._network, self._worker_id = network, worker_id
        self._contents = contents_digest(model_digest, layout, Share())
        self._loop = asyncio.get_running_loop()

    def pulling(self, serving: Placement, pace: LoadPace) -> "Pulling":
        """Pull from the workers of the placement that serves now."""
        return Pulling(self, serving, pace)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop and wait for it, on another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def dial(self, holder: PlacedWorker) -> PullClient:
        """Link to a worker.

        Raises:
            MoesaicError: it cannot be reached.
        """
        link = await self._network.connect(holder.weights_address, holder.worker_id, DIAL_TIMEOUT_S)
        row_bytes = self.layout.nbytes
        return PullClient(self._network, link, self._contents, row_bytes, PIECE_TIMEOUT_S)

    def holders(self, serving: Placement, layer: int, expert: int) -> list[PlacedWorker]:
        """Workers that give an expert; its replicas take turns to be the first."""
        if layer not in serving.layers:
            return []
        substitution, num_own = serving.substitution, serving.num_own
        held = [
            worker
            for worker, slots in zip(
                serving.workers, serving.slots[serving.layers.index(layer)], strict=True
            )
            if expert in {substitution.weights_id(slot, num_own) for slot in slots}
            and worker.weights_address
            and worker.worker_id != self._worker_id
        ]
        first = (expert + layer) % max(1, len(held))
        return held[first:] + held[:first]


class Pulling:
    """The pulls of one placement, on the thread that loads it; their links end with it."""

    def __init__(self, peers: ExpertPeers, serving: Placement, pace: LoadPace) -> None:
        self._peers, self._serving, self._pace = peers, serving, pace
        self._clients: dict[str, PullClient] = {}  # by worker id
        self._dialling = threading.Lock()
        self._failed: set[str] = set()  # not asked again for this placement
        self.pulled = 0

    def or_else(
        self, otherwise: Bring, came: Callable[[int, int], None] = lambda layer, expert: None
    ) -> Bring:
        """A loader, for several threads, that asks the holders of an expert, one after the other, then ``otherwise``.

        It tells ``came`` the layer and the weights id of each that a holder gave.
        """

        def bring(layer: int, expert: int) -> LoadedExpert:
            for holder in self._peers.holders(self._serving, layer, expert):
                if holder.worker_id not in self._failed:
                    loaded = self._from(holder, layer, expert)
                    if loaded is not None:
                        came(layer, expert)
                        return loaded
            return otherwise(layer, expert)

        return bring

    def close(self) -> None:
        """End the links."""

        async def end() -> None:
            for client in self._clients.values():
                client.link.discard("the placement is loaded")

        if self._clients:
            self._peers.call(end())

    def _from(self, holder: PlacedWorker, layer: int, expert: int) -> LoadedExpert | None:
        self._pace.check()
        layout = self._peers.layout
        packed = self._zeros(layout.nbytes)
        try:
            digests = self._pull(holder, layer, expert, packed)
        except MoesaicError as error:
            # The event loop's timers keep it until garbage is collected: it must not keep this thread's frames,
            # which have the experts of epochs that may be freed before.
            error.__traceback__ = None
            if isinstance(error, DamagedExpert):
                self._refuse("damaged", holder, layer, expert, str(error))
                return None
            self._pace.check()
            if not isinstance(
                error, ExpertUnavailable
            ):  # a holder without this one may have others
                self._failed.add(holder.worker_id)
            self._refuse("failed", holder, layer, expert, str(error))
            return None
        _pulls.labels("ok").inc()
        _pulled_bytes.inc(layout.nbytes)
        with self._dialling:
            self.pulled += 1
        return LoadedExpert(layout.view(packed), packed, digests)

    def _zeros(self, nbytes: int) -> Tensor:
        device = self._peers.device
        if device.type == "cpu":
            return huge_pages.zeros((nbytes,), torch.uint8)
        made = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        # It is filled on another thread.
        settle(device)
        return made

    def _pull(self, holder: PlacedWorker, layer: int, expert: int, into: Tensor) -> Tensor:
        """Fill ``into``, message by message.

        Returns:
            The digests of its pieces, int64 ``[pieces]``.
        """
        client, runs = self._client(holder), messages_of(len(into), len(into))
        first = expert * len(into)
        if self._pace.num_threads is None:
            return torch.cat(self._peers.call(client.pull_all(layer, runs, into, first)))
        digests = []
        for message in runs:
            with self._pace.working():
                digests += self._peers.call(client.pull_all(layer, [message], into, first))
        return torch.cat(digests)

    def _client(self, holder: PlacedWorker) -> PullClient:
        with self._dialling:
            client = self._clients.get(holder.worker_id)
            if client is None or not client.link.alive:
                client = self._peers.call(self._peers.dial(holder))
                self._clients[holder.worker_id] = client
            return client

    def _refuse(
        self, outcome: str, holder: PlacedWorker, layer: int, expert: int, cause: str
    ) -> None:
        _pulls.labels(outcome).inc()
        log.warning(
            "expert.not_pulled", peer=holder.worker_id, layer=layer, expert=expert, cause=cause
        )
