"""Links to placed expert workers, dialled until they answer."""

import asyncio
from collections.abc import Callable, Iterable

import structlog

from moesaic.messages.placement import PlacedWorker
from moesaic.transport.contract import Link, Network

log = structlog.get_logger()

DIAL_TIMEOUT_S = 5.0
DIAL_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # the last one repeats

_WorkerKey = tuple[str, int, str]  # worker id, generation, data address


class WorkerLinks:
    """Keeps one link to each worker that is wanted."""

    def __init__(self, network: Network, on_linked: Callable[[], None]) -> None:
        """Dial over ``network``; ``on_linked`` is called after each link that is made."""
        self._network, self._on_linked = network, on_linked
        self._links: dict[_WorkerKey, Link] = {}
        self._dialling: dict[_WorkerKey, asyncio.Task[None]] = {}

    def get(self, worker: PlacedWorker) -> Link | None:
        """The link to this generation of a worker, if it is alive."""
        link = self._links.get(_key(worker))
        return link if link is not None and link.alive else None

    def keep(self, wanted: Iterable[PlacedWorker], pinned: Iterable[PlacedWorker]) -> None:
        """Dial those wanted that are not linked; drop links to all others that are not pinned."""
        by_key = {_key(worker): worker for worker in wanted}
        used = {_key(worker) for worker in pinned}
        for key in [key for key in self._links if key not in by_key and key not in used]:
            self._links.pop(key).discard("no longer placed")
        for key in [key for key in self._dialling if key not in by_key]:
            self._dialling.pop(key).cancel()
        for key, worker in by_key.items():
            if self.get(worker) is None and key not in self._dialling:
                self._dialling[key] = asyncio.ensure_future(self._dial(key, worker))

    async def _dial(self, key: _WorkerKey, worker: PlacedWorker) -> None:
        attempt = 0
        try:
            while True:
                try:
                    self._links[key] = await self._network.connect(
                        worker.data_address, worker.worker_id, DIAL_TIMEOUT_S
                    )
                    break
                except Exception as error:  # of whatever kind: a later try may do better
                    if attempt in (0, 10):
                        log.warning(
                            "expert_worker.unreachable", peer=worker.worker_id, cause=repr(error)
                        )
                    await asyncio.sleep(DIAL_BACKOFF_S[min(attempt, len(DIAL_BACKOFF_S) - 1)])
                    attempt += 1
            log.info("expert_worker.linked", peer=worker.worker_id, generation=worker.generation)
        finally:
            if self._dialling.get(key) is asyncio.current_task():
                del self._dialling[key]
        self._on_linked()

    async def close(self) -> None:
        """Stop dialling and drop all links."""
        for task in self._dialling.values():
            task.cancel()
        await asyncio.gather(*self._dialling.values(), return_exceptions=True)
        for link in self._links.values():
            link.discard("closing")
        self._links = {}


def _key(worker: PlacedWorker) -> _WorkerKey:
    return worker.worker_id, worker.generation, worker.data_address
