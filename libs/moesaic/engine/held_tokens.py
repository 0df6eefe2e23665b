"""Tokens that nobody reads one by one: told several together.

Telling a token wakes another thread, sends a message and has a gateway read it, on cores that the
next step wants. Whoever waits for a whole answer loses nothing if its tokens wait for each other.
"""

import math
from collections.abc import Sequence

from moesaic.engine.requests import Event, RequestKey, TokenEvent


class HeldTokens:
    """Holds back tokens with patience, but for an answer's first: that it has begun is news."""

    def __init__(self) -> None:
        self._held: dict[RequestKey, list[TokenEvent]] = {}
        self._due_s = math.inf

    def pass_on(self, events: Sequence[Event], now_s: float) -> list[Event]:
        """What to tell now, of ``events`` and of what was held: everything of a request for which there is
        other news, and all there is once one token has waited as long as it may."""
        out: list[Event] = []
        for event in events:
            if isinstance(event, TokenEvent) and event.patience_s and event.index:
                self._held.setdefault(event.key, []).append(event)
                self._due_s = min(self._due_s, now_s + event.patience_s)
            else:
                out += self._held.pop(event.key, ())
                out.append(event)
        return out + self.release() if now_s >= self._due_s else out

    def release(self) -> list[Event]:
        """All that is held: it is to be told now."""
        out: list[Event] = [event for events in self._held.values() for event in events]
        self._held, self._due_s = {}, math.inf
        return out

    def forget(self, key: RequestKey) -> None:
        """Nobody waits for this request's tokens any more."""
        self._held.pop(key, None)
