"""Time limits for a worker that loads: as long as bytes arrive, and in proportion to their number."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from moesaic.errors import PeerLost
from moesaic.v1 import admin_pb2

T = TypeVar("T")

FLOOR_BYTES_PER_S = 20e6  # slower than any disk or link that is whole
STALLED_S = 60.0  # without a byte
LOOK_S = 1.0


class Patience:
    """The time that one worker has to load."""

    def __init__(self, worker_id: str, least_s: float, load_share: float, now_s: float) -> None:
        """Begin at ``now_s``.

        Args:
            worker_id: id of the worker, for errors.
            least_s: least time for any load, if the worker did nothing else.
            load_share: share of its time for loading.
            now_s: monotonic time.
        """
        self._worker_id, self._least_s, self._share = worker_id, least_s, load_share
        self._began_s = self._moved_s = now_s
        self._loading = admin_pb2.Loading()

    def limit_s(self) -> float:
        """Seconds that it has in all, as far as is known."""
        return (self._least_s + self._loading.total_bytes / FLOOR_BYTES_PER_S) / self._share

    def note(self, loading: admin_pb2.Loading | None, now_s: float) -> None:
        """Record its progress; None: unknown.

        Raises:
            PeerLost: its time is over, or no byte has come for ``STALLED_S``.
        """
        if loading is not None and loading.total_bytes:
            if loading.done_bytes != self._loading.done_bytes or not self._loading.total_bytes:
                self._moved_s = now_s
            self._loading = loading
        done, total = self._loading.done_bytes, self._loading.total_bytes
        if total and now_s - self._moved_s > STALLED_S:
            raise PeerLost(
                self._worker_id,
                f"loading has stalled: no byte for {STALLED_S:.0f} s, {done} of {total} are there",
            )
        if now_s - self._began_s > self.limit_s():
            told = f", {done} of {total} bytes are there" if total else ""
            raise PeerLost(self._worker_id, f"has not loaded within {self.limit_s():.0f} s{told}")


async def while_it_loads(
    answer: Coroutine[Any, Any, T],
    look: Callable[[], Awaitable[admin_pb2.Loading | None]],
    patience: Patience,
) -> T:
    """Wait for an answer for as long as ``patience`` has it; raises what ``Patience.note`` raises."""
    answering = asyncio.create_task(answer)
    try:
        while True:
            timeout_s = min(LOOK_S, patience.limit_s())
            done, _ = await asyncio.wait({answering}, timeout=timeout_s)
            if done:
                return answering.result()
            patience.note(await look(), time.monotonic())
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
