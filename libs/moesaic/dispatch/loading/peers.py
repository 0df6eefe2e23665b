"""Experts from workers that hold them, before the checkpoint is read."""

import asyncio
import itertools
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import structlog
import torch
from prometheus_client import Counter
from torch import Tensor

from moesaic.dispatch.loading.experts import Bring, LoadedExpert, content_digest
from moesaic.dispatch.loading.giving import COLUMNS, PIECE_BYTES, PULL, pull_identity
from moesaic.dispatch.loading.pace import Pace
from moesaic.errors import MoesaicError, PeerLost
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.native.memory import huge_pages
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

log = structlog.get_logger()
T = TypeVar("T")

DIAL_TIMEOUT_S = 2.0
PIECE_TIMEOUT_S = 5.0

_pulls = Counter("moesaic_expert_pulls", "experts asked of peers", ["outcome"])
_pulled_bytes = Counter("moesaic_expert_pulled_bytes", "bytes of experts that peers gave")


class Peers:
    """Reaches other workers for their experts, on the event loop of ``network``."""

    def __init__(
        self, network: Network, worker_id: str, layout: ExpertLayout, model_digest: str
    ) -> None:
        """Make it on that event loop."""
        self._network, self._worker_id, self._layout = network, worker_id, layout
        self._identity = pull_identity(model_digest, layout)
        self._loop = asyncio.get_running_loop()

    def pulling(self, serving: Placement, pace: Pace) -> "Pulling":
        """Pull from the workers of the placement that serves now."""
        return Pulling(self, serving, pace)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait on another thread for work on the event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def holders(self, serving: Placement, layer: int, expert: int) -> list[PlacedWorker]:
        """Who holds an expert, each expert's list beginning elsewhere."""
        if layer not in serving.layers or not 0 <= expert < serving.num_experts:
            return []
        held = [
            worker
            for worker, slots in zip(
                serving.workers, serving.slots[serving.layers.index(layer)], strict=True
            )
            if expert in slots and worker.worker_id != self._worker_id
        ]
        first = expert % max(1, len(held))
        return held[first:] + held[:first]


class Pulling:
    """The pulls of one placement; its links end with it, for peers wait for them when they leave."""

    def __init__(self, peers: Peers, serving: Placement, pace: Pace) -> None:
        self._peers, self._serving, self._pace = peers, serving, pace
        self._links: dict[str, Link] = {}
        self._failed: set[str] = set()  # not asked again for this placement
        self._seq = itertools.count(1)
        self.pulled = 0

    def or_else(self, otherwise: Bring) -> Bring:
        """What asks the holders of an expert, one after the other, and then ``otherwise``."""

        def bring(layer: int, expert: int) -> LoadedExpert:
            for holder in self._peers.holders(self._serving, layer, expert):
                if holder.worker_id not in self._failed:
                    loaded = self._from(holder, layer, expert)
                    if loaded is not None:
                        return loaded
            return otherwise(layer, expert)

        return bring

    def close(self) -> None:
        """End the links."""

        async def end() -> None:
            for link in self._links.values():
                link.discard("what was wanted has come")

        self._peers.call(end())

    def _from(self, holder: PlacedWorker, layer: int, expert: int) -> LoadedExpert | None:
        self._pace.check()
        layout = self._peers._layout
        packed = huge_pages.zeros((layout.nbytes,), torch.uint8)
        try:
            digest = self._peers.call(self._pull(holder, layer, expert, packed))
        except MoesaicError as error:
            self._pace.check()
            self._failed.add(holder.worker_id)
            self._refuse("failed", holder, layer, expert, str(error))
            return None
        if content_digest(packed) != digest:
            self._refuse("damaged", holder, layer, expert, "the digest differs")
            return None
        _pulls.labels("ok").inc()
        _pulled_bytes.inc(layout.nbytes)
        self.pulled += 1
        return LoadedExpert(layout.view(packed), packed, digest)

    def _refuse(
        self, outcome: str, holder: PlacedWorker, layer: int, expert: int, cause: str
    ) -> None:
        _pulls.labels(outcome).inc()
        log.warning(
            "expert.not_pulled", peer=holder.worker_id, layer=layer, expert=expert, cause=cause
        )

    async def _pull(self, holder: PlacedWorker, layer: int, expert: int, into: Tensor) -> int:
        """Fill ``into``; returns the digest that it should have."""
        network = self._peers._network
        link = self._links.get(holder.worker_id)
        if link is None or not link.alive:
            link = await network.connect(holder.data_address, holder.worker_id, DIAL_TIMEOUT_S)
            self._links[holder.worker_id] = link
        digest = 0
        for start in range(0, len(into), PIECE_BYTES):
            began = time.monotonic()
            part = into[start : start + PIECE_BYTES]
            request = Frame(
                kind=FrameKind.REQUEST,
                flags=PULL,
                layer=layer,
                seq=next(self._seq),
                digest=self._peers._identity,
                tensors=[torch.tensor([[expert, start, len(part)]])],
            )
            [outcome] = await network.exchange([(link, request)], PIECE_TIMEOUT_S)
            if isinstance(outcome, MoesaicError):
                raise outcome
            if [tuple(t.shape) for t in outcome.tensors] != [(len(part) // 64, COLUMNS)]:
                link.discard("its expert has another size")
                raise PeerLost(holder.worker_id, "its expert has another size")
            part.numpy()[:] = outcome.tensors[0].numpy().view(np.uint8).reshape(-1)
            digest = outcome.digest
            await self._pace.rest_between(time.monotonic() - began)
        return digest
