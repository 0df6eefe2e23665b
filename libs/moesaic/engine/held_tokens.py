"""Tokens that nobody reads one by one: told several together.

Telling a token wakes another thread, sends a message and has a gateway read it, on cores that the
next step wants. Whoever waits for a whole answer loses nothing if its tokens wait for each other.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from moesaic.engine.requests import Event, RequestKey, TokenEvent


class HeldTokens:
    """Holds back tokens with patience, but for an answer's first: that it has begun is news."""

    def __init__(self) -> None:
        self._held: dict[RequestKey, list[TokenEvent]] = {}
        self.due_s = math.inf  # when what is held has to be told, on the monotonic clock

    def pass_on(self, events: Sequence[Event], now_s: float) -> list[Event]:
        """What to tell now, of ``events`` and of what was held: everything of a request for which there is
        other news, and all there is once one token has waited as long as it may."""
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
        """All that is held: it is to be told now."""
        out: list[Event] = [event for events in self._held.values() for event in events]
        self._held, self.due_s = {}, math.inf
        return out

    def forget(self, key: RequestKey) -> None:
        """Nobody waits for this request's tokens any more."""
        self._held.pop(key, None)


class Teller:
    """Tells events of one engine, tokens with patience together. Lives on the engine's event loop."""

    def __init__(self, emit: Callable[[list[Event]], None]) -> None:
        self._emit, self._held = emit, HeldTokens()
        self._at_the_latest: asyncio.TimerHandle | None = (
            None  # a step may wait for experts for long
        )

    def tell(self, events: Sequence[Event]) -> None:
        """Tell what has to be told now."""
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
        """Nobody waits for this request's tokens any more."""
        self._held.forget(key)
