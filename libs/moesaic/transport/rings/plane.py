"""All channels of one event loop: their bell, and the loop's sleep."""

import asyncio
import ctypes
import os
import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from moesaic.errors import FrameError
from moesaic.native.library import lib
from moesaic.transport.frame import Message
from moesaic.transport.rings.channel import Channel

log = structlog.get_logger()

MESSAGES = 1  # of wait_for_events: a channel has something for Python
_FOREVER = -1
_A_TURN = 64  # messages of a channel before others get their turn


class RingSelector(selectors.EpollSelector):
    """A selector that looks after channels while its loop sleeps.

    Messages that C functions can answer are answered without waking Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plane: RingPlane | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See ``BaseSelector.select``."""
        plane = self.plane
        if plane is None or not plane.channels:
            return super().select(timeout)
        messages = plane.wait(self.fileno(), timeout)
        # What only tells of messages was heard already: Python would take those that C can answer.
        ready = [each for each in super().select(0) if each[0].fd not in plane.heard]
        if messages:
            ready.append((self.get_key(plane.bell), selectors.EVENT_READ))
        return ready


def new_event_loop() -> asyncio.SelectorEventLoop:
    """Make an event loop that can sleep on channels."""
    return asyncio.SelectorEventLoop(RingSelector())


class RingPlane:
    """The channels of one network. Lives on the event loop that runs when it is made.

    Attributes:
        bell: an eventfd that peers write to while this process sleeps.
        channels: those that are open, with the receivers of their messages.
        heard: descriptors that only tell of messages in these.
        by_selector: true if the event loop looks after channels while it sleeps.
    """

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.channels: dict[Channel, Callable[[Message], None]] = {}
        self._on_lost: dict[Channel, Callable[[str], None]] = {}
        self._c: Any = (ctypes.c_void_p * 0)()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.bell, self.look)
        selector = getattr(self._loop, "_selector", None)
        # It looks after one network. Others on its loop are woken as on any loop.
        free = isinstance(selector, RingSelector) and selector.plane is None
        self._selector: RingSelector | None = selector if free else None
        self.by_selector = free
        self.heard = frozenset([self.bell])
        if self._selector is not None:
            self._selector.plane = self

    def add(
        self,
        channel: Channel,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Receive the messages of a channel from now on; the loop calls back, never from within."""
        self.channels[channel], self._on_lost[channel] = on_message, on_lost
        self._changed()
        self._loop.call_soon(self.look)

    def remove(self, channel: Channel) -> None:
        """Receive no more of its messages; calling it again changes nothing."""
        if self.channels.pop(channel, None) is not None:
            del self._on_lost[channel]
            channel.close()
            self._changed()

    def wait(self, epoll: int, timeout: float | None) -> bool:
        """Sleep until something happens; True if a channel has messages for Python."""
        timeout_ns = _FOREVER if timeout is None else max(0, round(timeout * 1e9))
        found = lib().wait_for_events(
            channels=self._c,
            count=len(self._c),
            epoll=epoll,
            bell=self.bell,
            timeout_ns=timeout_ns,
        )
        return bool(found == MESSAGES)

    def close(self) -> None:
        """Close all channels."""
        for channel in list(self.channels):
            self.remove(channel)
        if self._selector is not None:
            self._selector.plane = None
        self._loop.remove_reader(self.bell)
        # A later turn may still want to read it.
        bell, self.bell = self.bell, -1
        os.close(bell)

    @property
    def c_channels(self) -> tuple[Any, int]:
        """All channels, as an array for C functions, and their number; valid until one comes or goes."""
        return self._c, len(self._c)

    def _changed(self) -> None:
        self._c = (ctypes.c_void_p * len(self.channels))(*(each.c for each in self.channels))
        self.heard = frozenset([self.bell, *(each.descriptor for each in self.channels)])

    def look(self) -> None:
        """Take what has come, and have the bell rung for what comes next."""
        with suppress(BlockingIOError, OSError):
            os.eventfd_read(self.bell)
        again = False
        for channel, on_message in list(self.channels.items()):
            for _ in range(_A_TURN):
                message = self._next_of(channel)
                if message is None:
                    break
                try:
                    on_message(message)
                except Exception:  # one receiver's fault must not stop the others
                    log.exception("message.failed")
            else:
                again = True
        # A loop of another kind sleeps without looking after channels.
        if not self.by_selector:
            again |= not all([channel.sleep() for channel in self.channels])
        if again:
            self._loop.call_soon(self.look)

    def _next_of(self, channel: Channel) -> Message | None:
        if channel not in self.channels:
            return None
        try:
            return channel.receive()
        except FrameError as error:
            self._loop.call_soon(self._on_lost[channel], error.problem)
            self.remove(channel)
            return None
