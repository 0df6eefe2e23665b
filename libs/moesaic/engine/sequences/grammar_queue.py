"""Grammars that wait to be compiled: tenants take turns, by the time that their grammars have taken.

The rules are those of ``moesaic.fairness``. Besides, a tenant has one grammar compiled at a time, so
that another's need not wait for the end of a heavy one.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from moesaic.engine.sequences.grammar_cache import Source
from moesaic.errors import Overloaded
from moesaic.fairness import Claim, Shares, who_gives_way

T = TypeVar("T")

NUM_THREADS = 2
MAX_WAITING = 32  # of all tenants; the longest takes two seconds
LONG_MS = 2000  # a request whose grammars have taken so long is a long one


@dataclass(eq=False)
class _Entry(Generic[T]):
    source: Source
    claim: Claim
    compiled: asyncio.Future[T]
    wanted_by: int = field(default=0)  # requests of the tenant


class GrammarQueue(Generic[T]):
    """Grammars that wait, and those that threads compile now. Lives on one event loop."""

    def __init__(self, compile_one: Callable[[Source, str], T]) -> None:
        """``compile_one`` compiles a source for a tenant, on any thread."""
        self._compile_one = compile_one
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._waiting: list[_Entry[T]] = []
        self._running: list[_Entry[T]] = []
        self._shares = Shares()
        self._arrivals = 0

    async def compiled(self, source: Source, claim: Claim) -> T:
        """Have a grammar compiled. Requests of one tenant for the same grammar share one compilation.

        Raises:
            Overloaded: too many grammars wait, and this one has to give way.
        """
        entry = self._entry(source, claim)
        entry.wanted_by += 1
        try:
            return await asyncio.shield(entry.compiled)
        finally:
            entry.wanted_by -= 1
            if not entry.wanted_by and entry in self._waiting:
                self._waiting.remove(entry)

    def _entry(self, source: Source, claim: Claim) -> _Entry[T]:
        for entry in (*self._running, *self._waiting):
            if entry.source == source and entry.claim.party == claim.party:
                return entry
        claim = claim._replace(arrival=self._arrivals)
        free = MAX_WAITING - len(self._waiting)
        leaving = who_gives_way(claim, 1, free, self._waiting, lambda _: 1, among_requests=False)
        full = f"{len(self._waiting)} grammars wait to be compiled"
        if leaving is None:
            raise Overloaded(full)
        for entry in leaving:
            self._waiting.remove(entry)
            entry.compiled.set_exception(Overloaded(full))
        self._arrivals += 1
        entry = _Entry(source, claim, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._start_next()
        return entry

    def _start_next(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._running) < NUM_THREADS:
            busy = {entry.claim.tenant for entry in self._running}
            ready = [entry for entry in self._waiting if entry.claim.tenant not in busy]
            if not ready:
                return
            entry = self._shares.in_turn(ready, LONG_MS)[0]
            self._waiting.remove(entry)
            self._running.append(entry)
            work = partial(self._compile_one, entry.source, entry.claim.tenant)
            running = loop.run_in_executor(self._threads, work)
            running.add_done_callback(partial(self._ended, entry, loop.time()))

    def _ended(self, entry: _Entry[T], started_s: float, running: asyncio.Future[T]) -> None:
        self._running.remove(entry)
        took_ms = round(1000 * (asyncio.get_running_loop().time() - started_s)) + 1
        self._shares.note(entry.claim, took_ms)
        left = [waiting.claim for waiting in self._waiting]
        self._shares.served([(entry.claim, took_ms)], left, LONG_MS)
        _pass_on(running, entry.compiled)
        self._start_next()


def _pass_on(done: asyncio.Future[T], to: asyncio.Future[T]) -> None:
    if done.cancelled():
        to.cancel()
    elif (error := done.exception()) is not None:
        to.set_exception(error)
        to.exception()  # if nobody waits any longer, nobody need hear of it
    else:
        to.set_result(done.result())
