"""One ``Network.exchange`` under way: exactly one outcome for each call, whatever happens to its link."""

import asyncio
from collections.abc import Sequence
from functools import partial

from moesaic.errors import DeadlineExceeded, MoesaicError
from moesaic.transport.dialled import DialledLink
from moesaic.transport.frame import Frame


class Exchange:
    """Frames that are sent together and awaited together."""

    def __init__(self, calls: Sequence[tuple[DialledLink, Frame]], deadline_s: float) -> None:
        self._calls, self._deadline_s = calls, deadline_s
        self._outcomes: list[Frame | MoesaicError | None] = [None] * len(calls)
        self._missing = len(calls)
        self._done = asyncio.get_running_loop().create_future()

    async def run(self) -> list[Frame | MoesaicError]:
        """Send, and wait for every outcome; see ``Network.exchange``."""
        if not self._calls:
            return []
        timer = asyncio.get_running_loop().call_later(self._deadline_s, self._expire)
        try:
            for idx, (link, frame) in enumerate(self._calls):
                link.call(frame, partial(self._settle, idx))
            await self._done
        except asyncio.CancelledError:
            self._give_up("cancelled")
            raise
        finally:
            timer.cancel()
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _settle(self, idx: int, outcome: Frame | MoesaicError) -> None:
        """Give call ``idx`` its outcome; the first one stands."""
        if self._outcomes[idx] is not None:
            return
        self._outcomes[idx] = outcome
        self._missing -= 1
        if self._missing == 0 and not self._done.done():
            self._done.set_result(None)

    def _expire(self) -> None:
        self._give_up(f"no answer within {self._deadline_s * 1e3:.0f} ms")

    def _give_up(self, cause: str) -> None:
        late = [idx for idx, outcome in enumerate(self._outcomes) if outcome is None]
        # All are settled first: a discarded link would call its other calls lost.
        for idx in late:
            link, frame = self._calls[idx]
            what = f"layer {frame.layer} on {link.peer}"
            self._settle(idx, DeadlineExceeded(what, self._deadline_s * 1e3))
        for idx in late:
            self._calls[idx][0].discard(cause)
