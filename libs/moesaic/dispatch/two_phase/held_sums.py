"""Sums that wait on an expert worker for the colleague that adds them up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from moesaic.errors import MoesaicError, Overloaded
from moesaic.transport.frame import Frame

MAX_HELD = 1024

Ticket = tuple[bytes, int, int]  # step, layer, and the sender's number of the round


@dataclass(eq=False)
class _Held:
    reply: "asyncio.Future[Frame]"
    expiry: asyncio.TimerHandle


class HeldSums:
    """Keeps sums; rows and the one that collects their sum come in any order. Lives on one event loop."""

    def __init__(self) -> None:
        self._held: dict[Ticket, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, ticket: Ticket, keep_s: float, compute: Callable[[], Frame]) -> Frame:
        """Compute a reply, and keep it, or why there is none, until it is collected.

        Args:
            ticket: ticket for its collection.
            keep_s: time after which nobody comes for it any more.
            compute: gives the reply.

        Raises:
            Overloaded: too many wait to be collected.
            Exception: the error of ``compute``.
        """
        held = self._of(ticket, keep_s)
        try:
            reply = compute()
        except BaseException as error:
            if not held.reply.done():
                known = isinstance(error, MoesaicError)
                held.reply.set_exception(
                    error if known else MoesaicError("the worker failed; see its log")
                )
                # Nobody may come for it.
                held.reply.exception()
            raise
        if not held.reply.done():
            held.reply.set_result(reply)
        return reply

    async def collect(self, ticket: Ticket, budget_s: float) -> Frame | None:
        """Take a sum that is kept.

        Returns:
            The reply with it, now or within ``budget_s``; ``None`` if nothing comes.

        Raises:
            Overloaded: too many wait already.
            MoesaicError: why there is no reply.
        """
        reply = self._of(ticket, budget_s).reply
        try:
            await asyncio.wait({reply}, timeout=budget_s)
            return reply.result() if reply.done() and not reply.cancelled() else None
        finally:
            self._drop(ticket)

    def close(self) -> None:
        """Let go of everything; those who wait get nothing."""
        for ticket, held in list(self._held.items()):
            held.reply.cancel()
            self._drop(ticket)

    def _of(self, ticket: Ticket, keep_s: float) -> _Held:
        held = self._held.get(ticket)
        if held is None:
            if len(self._held) >= MAX_HELD:
                raise Overloaded(f"{MAX_HELD} sums wait to be collected", 0.1)
            loop = asyncio.get_running_loop()
            expiry = loop.call_later(keep_s, self._drop, ticket)
            held = self._held[ticket] = _Held(loop.create_future(), expiry)
        return held

    def _drop(self, ticket: Ticket) -> None:
        held = self._held.pop(ticket, None)
        if held is not None:
            held.expiry.cancel()
