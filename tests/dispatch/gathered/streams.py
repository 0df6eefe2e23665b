"""Twins of a device's streams: copies from the host's memory to a second buffer of the host's."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor


class ThreadStreams:
    """An executor stands for the stream of copies; kernels compute where they are called."""

    def __init__(self) -> None:
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="copies")

    def lock(self, memory: Tensor) -> None:
        """It stays where it is."""

    def copy(self, source: Tensor, into: Tensor) -> None:
        # Torch would copy with a team of threads, and keep it.
        def copied() -> None:
            into.numpy()[:] = source.numpy()

        self._copies.submit(copied)

    def record_copies(self) -> "Future[float]":
        return self._copies.submit(time.perf_counter)

    def record_kernels(self) -> "Future[float]":
        ended: Future[float] = Future()
        ended.set_result(time.perf_counter())
        return ended

    def copies_wait(self, event: "Future[float]") -> None:
        self._copies.submit(event.result)

    def kernels_wait(self, event: "Future[float]") -> None:
        event.result()

    def has_come(self, event: "Future[float]") -> bool:
        return event.done()

    async def come(self, event: "Future[float]") -> None:
        # A waiter that leaves does not end it.
        await asyncio.shield(asyncio.wrap_future(event))

    def seconds(self, first: "Future[float]", last: "Future[float]") -> float:
        return last.result() - first.result()

    def close(self) -> None:
        self._copies.shutdown()


@dataclass
class Moment:
    """An event, and when it came."""

    at_s: float | None = None


class LateStreams:
    """Copies come as late as they may: once somebody waits for them."""

    def __init__(self) -> None:
        self._copies: deque[Callable[[], object]] = deque()

    def lock(self, memory: Tensor) -> None:
        """It stays where it is."""

    def copy(self, source: Tensor, into: Tensor) -> None:
        self._copies.append(lambda: into.copy_(source))

    def record_copies(self) -> Moment:
        moment = Moment()
        self._copies.append(lambda: self._come(moment))
        return moment

    def record_kernels(self) -> Moment:
        moment = Moment()
        self._come(moment)
        return moment

    def copies_wait(self, event: Moment) -> None:
        # Kernels have ended where they were called.
        assert event.at_s is not None

    def kernels_wait(self, event: Moment) -> None:
        while event.at_s is None:
            self._copies.popleft()()

    def has_come(self, event: Moment) -> bool:
        return event.at_s is not None

    async def come(self, event: Moment) -> None:
        self.kernels_wait(event)

    def seconds(self, first: Moment, last: Moment) -> float:
        self.kernels_wait(last)
        assert first.at_s is not None
        assert last.at_s is not None
        return last.at_s - first.at_s

    def close(self) -> None:
        while self._copies:
            self._copies.popleft()()

    def _come(self, moment: Moment) -> None:
        moment.at_s = time.perf_counter()
