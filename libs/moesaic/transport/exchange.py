"""The calls of one exchange and their outcomes: exactly one for each call, whatever happens to its link."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moesaic.errors import DeadlineExceeded, MoesaicError
from moesaic.transport.frame import Frame

if TYPE_CHECKING:
    from moesaic.transport.dialled import DialledLink


class Batch:
    """Frames that are sent together and awaited together."""

    def __init__(self, calls: "Sequence[tuple[DialledLink, Frame]]", deadline_s: float) -> None:
        self._calls, self._deadline_s = calls, deadline_s
        self._outcomes: list[Frame | MoesaicError | None] = [None] * len(calls)
        self._missing = len(calls)
        self._done = asyncio.get_running_loop().create_future()

    def settle(self, idx: int, outcome: Frame | MoesaicError) -> None:
        """Give call ``idx`` its outcome; the first one stands."""
        if self._outcomes[idx] is not None:
            return
        self._outcomes[idx] = outcome
        self._missing -= 1
        if self._missing == 0 and not self._done.done():
            self._done.set_result(None)

    async def run(self) -> list[Frame | MoesaicError]:
        """Send, and wait for every outcome; see ``Network.exchange``."""
        if not self._calls:
            return []
        timer = asyncio.get_running_loop().call_later(self._deadline_s, self._expire)
        try:
            for idx, (link, frame) in enumerate(self._calls):
                link.call(frame, self, idx)
            await self._done
        except asyncio.CancelledError:
            self._give_up("cancelled")
            raise
        finally:
            timer.cancel()
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _expire(self) -> None:
        self._give_up(f"no answer within {self._deadline_s * 1e3:.0f} ms")

    def _give_up(self, cause: str) -> None:
        late = [idx for idx, outcome in enumerate(self._outcomes) if outcome is None]
        for (
            idx
        ) in late:  # all of them first: a discarded link would call the others of this batch lost
            link, frame = self._calls[idx]
            self.settle(
                idx, DeadlineExceeded(f"layer {frame.layer} on {link.peer}", self._deadline_s * 1e3)
            )
        for idx in late:
            self._calls[idx][0].discard(cause)
