"""The ring: memory for a few layers, filled ahead in the order in which a step computes them.

Everything here belongs to the thread that computes; only ``Fill.done`` is set by another.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Fill:
    """One layer's way into one buffer of the ring."""

    layer: int
    buffer: int
    after: "Fill | None"  # of the same buffer, before: it must have ended
    # The host writes to the buffer no more: the experts are there, or an error. To a device their
    # copies have been ordered.
    done: "Future[None]" = field(default_factory=Future)
    wanted: bool = True  # else it may end early, with an error
    # On a device: kernels that compute with it wait for this event of its copies.
    copied: Any = None

    def __post_init__(self) -> None:
        # A waiter that leaves does not end it.
        self.done.set_running_or_notify_cancel()

    async def ended(self) -> None:
        """Wait on any event loop until ``done`` is set, to success or an error."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def tell(_: object) -> None:
            # The loop is closed: nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(over.set)

        self.done.add_done_callback(tell)
        await over.wait()


class Ring:
    """The layer in each buffer. Steps ask for all layers, in order, again and again."""

    def __init__(
        self, layers: Sequence[int], num_buffers: int, start: Callable[[Fill], None]
    ) -> None:
        """
        Args:
            layers: layers in the order in which steps compute them; at least one.
            num_buffers: number of layers that fit into memory, at least one and at most all.
            start: begins to fill; returns at once.
        """
        assert 1 <= num_buffers <= len(layers)
        self._layers, self._start = layers, start
        self._last: list[Fill | None] = [None] * num_buffers  # of each buffer
        self._ahead: deque[Fill] = deque()
        self._next = 0  # index of the layer to be ordered next

    def prime(self) -> None:
        """Begin with the first layers."""
        for buffer in range(len(self._last)):
            self._order(buffer)

    def enter(self, layer: int) -> Fill:
        """The fill of ``layer``, which is computed next.

        If another layer is due, because a step ended early, all fills begin anew from ``layer``.
        """
        due = self._ahead[0]
        if due.layer != layer or (due.done.done() and not _succeeded(due)):
            self._rewind(layer)
        return self._ahead[0]

    def leave(self, fill: Fill) -> None:
        """Give the buffer of a computed layer to the next one."""
        if self._ahead and self._ahead[0] is fill:
            self._ahead.popleft()
            self._order(fill.buffer)

    def _order(self, buffer: int) -> None:
        layer = self._layers[self._next]
        self._next = (self._next + 1) % len(self._layers)
        before = self._last[buffer]
        fill = self._last[buffer] = Fill(layer, buffer, before)
        self._ahead.append(fill)
        if before is not None and before.layer == layer and _succeeded(before):
            fill.after, fill.copied = None, before.copied
            # There is room for all layers: it is still there.
            fill.done.set_result(None)
            return
        self._start(fill)

    def _rewind(self, layer: int) -> None:
        buffers = [fill.buffer for fill in self._ahead]
        for fill in self._ahead:
            fill.wanted = False
        self._ahead.clear()
        self._next = self._layers.index(layer)
        for buffer in buffers:
            self._order(buffer)


def _succeeded(fill: Fill) -> bool:
    return fill.done.done() and fill.done.exception() is None
