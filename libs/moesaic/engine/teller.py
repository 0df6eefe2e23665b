"""Holding back of tokens that nobody reads one by one, so that several are told together.

Telling a token wakes another thread, sends a message and has a gateway read it, on cores that the
next step wants. A caller that waits for a whole answer loses nothing if its tokens wait.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from moesaic.engine.sequences.requests import Event, RequestKey, TokenEvent


class HeldTokens:
    """Holds back tokens with patience, except an answer's first: its beginning is news."""

    def __init__(self) -> None:
        self._held: dict[RequestKey, list[TokenEvent]] = {}
        self.due_s = math.inf  # when held tokens must be told, on the monotonic clock

    def pass_on(self, events: Sequence[Event], now_s: float) -> list[Event]:
        """Choose what to tell now, of ``events`` and of the tokens held.

        Returns:
            All events of a request for which there is other news; everything, once one token has
            waited as long as it may.
        """
        out: list[Event] = []
        for event in events:
            if isinstance(event, TokenEvent) and event.patience_s and event.index:
                self._held.setdefault(event.key, []).append(event)
                self.due_s = min(self.due_s, now_s + event.patience_s)
            else:
                out += self._held.pop(event.key, ())
                out.append(event)
        return out + self.release() if now_s >= self.due_s else out

    def release(self) -> list[Event]:
        """Return all that is held, to be told now."""
        out: list[Event] = [event for events in self._held.values() for event in events]
        self._held, self.due_s = {}, math.inf
        return out

    def forget(self, key: RequestKey) -> None:
        """Drop the tokens of a request that nobody waits for any more."""
        self._held.pop(key, None)


class Teller:
    """Tells events of one engine, tokens with patience together. Lives on the engine's event loop."""

    def __init__(self, emit: Callable[[list[Event]], None]) -> None:
        self._emit, self._held = emit, HeldTokens()
        # A step may wait for experts for long, and tell nothing meanwhile.
        self._at_the_latest: asyncio.TimerHandle | None = None

    def tell(self, events: Sequence[Event]) -> None:
        """Tell the events that cannot wait, and hold back the others."""
        now_s = time.monotonic()
        if news := self._held.pass_on(events, now_s):
            self._emit(news)
        if self._held.due_s < math.inf and self._at_the_latest is None:
            loop = asyncio.get_running_loop()
            self._at_the_latest = loop.call_later(self._held.due_s - now_s, self.tell_held)

    def tell_held(self) -> None:
        """Tell all that is held."""
        if self._at_the_latest is not None:
            self._at_the_latest.cancel()
            self._at_the_latest = None
        if held := self._held.release():
            self._emit(held)

    def forget(self, key: RequestKey) -> None:
        """Drop the tokens of a request that nobody waits for any more."""
        self._held.forget(key)
