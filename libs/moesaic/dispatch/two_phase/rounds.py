"""Phase 1: the rows of one node's attention workers, brought together layer by layer.

Workers step at their own pace, so a round takes whatever joins it while it is open; ``waiting`` says
how long.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

import structlog
from torch import Tensor

from moesaic.dispatch.route import Route
from moesaic.dispatch.two_phase.waiting import RoundWaits
from moesaic.errors import MoesaicError, NotReady

log = structlog.get_logger()


@dataclass(eq=False)
class Contribution:
    """One worker's rows for one layer, and its wait for their sum."""

    worker_id: str
    hidden: Tensor  # [n, H]
    route: Route
    members: int = 0  # workers in its round, once that has left
    sums: "asyncio.Future[Tensor | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


SendRound = Callable[[int, Sequence[Contribution]], Awaitable[Tensor | None]]
"""Takes a layer, and contributions by worker id; returns the sums of all rows in their order, or ``None`` if the rows
should go directly."""


@dataclass(eq=False)
class _Round:
    """Contributions to one layer, until they leave together."""

    key: Hashable
    layer: int
    first: bool  # of a step's layers
    awaited: set[str]
    contributions: list[Contribution] = field(default_factory=list)
    closing: asyncio.TimerHandle | None = None  # set once it is open

    @property
    def rows(self) -> int:
        return sum(len(each.hidden) for each in self.contributions)

    def fail(self, error: MoesaicError) -> None:
        for each in self.contributions:
            if not each.sums.done():
                each.sums.set_exception(error)
                # Its worker may have gone.
                each.sums.exception()

    def settle(self, sums: Tensor | None, members: Sequence[Contribution]) -> None:
        start = 0
        for each in members:
            end = start + len(each.hidden)
            # Its worker may have gone.
            if not each.sums.done():
                each.sums.set_result(None if sums is None else sums[start:end])
            start = end


class Rounds:
    """Opens and closes rounds. Lives on the engine thread's event loop."""

    def __init__(self, send: SendRound, max_rows: int) -> None:
        """Bring together what ``send`` takes, at most ``max_rows`` unless one worker alone has more."""
        self._send, self._max_rows = send, max_rows
        self.waits = RoundWaits()
        self._open: dict[Hashable, _Round] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def join(self, layer: int, contribution: Contribution) -> Tensor | None:
        """Put rows into the round for ``layer``, and wait for their sums.

        Only rows that the same experts can be asked for together share a round.

        Returns:
            The sums; ``None`` if the whole round should go directly.

        Raises:
            MoesaicError: the whole round failed.
        """
        key, worker_id = _key(layer, contribution), contribution.worker_id
        layers, loop = contribution.route.targets, asyncio.get_running_loop()
        first, last = layer == min(layers), layer == max(layers)
        round_ = self._open.get(key)
        if round_ is not None and round_.rows + len(contribution.hidden) > self._max_rows:
            self._close(round_)
            round_ = None
        if round_ is None:
            awaited = self.waits.awaited(worker_id, first)
            round_ = self._open[key] = _Round(key, layer, first, awaited)
            round_.closing = loop.call_later(self.waits.patience_s(first), self._close, round_)
        round_.contributions.append(contribution)
        self.waits.came(worker_id, loop.time(), first=first, last=last)
        for other in list(self._open.values()):
            if other is round_ or not other.first:
                other.awaited.discard(worker_id)
        self._close_complete()
        return await contribution.sums

    def pass_by(self, worker_id: str) -> None:
        """Let nobody wait for this worker's rows: they go directly."""
        for round_ in self._open.values():
            round_.awaited.discard(worker_id)
        self._close_complete()

    def keep(self, workers: Collection[str]) -> None:
        """Know only these workers from now on, and wait for nobody else; others may come again."""
        self.waits.keep(workers)
        for round_ in self._open.values():
            round_.awaited &= set(workers)
        self._close_complete()

    async def close(self) -> None:
        """Fail the rounds that are open, and end those that run."""
        for round_ in list(self._open.values()):
            self._open.pop(round_.key)
            if round_.closing is not None:
                round_.closing.cancel()
            round_.fail(NotReady("this attention worker stopped", code="draining"))
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _close_complete(self) -> None:
        for round_ in list(self._open.values()):
            if not round_.awaited:
                self._close(round_)

    def _close(self, round_: _Round) -> None:
        if self._open.get(round_.key) is not round_:
            return
        del self._open[round_.key]
        if round_.closing is not None:
            round_.closing.cancel()
        members = frozenset(each.worker_id for each in round_.contributions)
        self.waits.left(round_.first, members, round_.awaited)
        task = asyncio.get_running_loop().create_task(self._run(round_, len(members)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, round_: _Round, members: int) -> None:
        loop = asyncio.get_running_loop()
        contributions = sorted(round_.contributions, key=lambda each: each.worker_id)
        for each in contributions:
            each.members = members
        started = loop.time()
        try:
            sums = await self._send(round_.layer, contributions)
        except MoesaicError as error:
            round_.fail(error)
            return
        except Exception:
            log.exception("exchange.broken", layer=round_.layer)
            round_.fail(MoesaicError("the round failed; see the log"))
            return
        except BaseException:  # this worker stops
            round_.fail(NotReady("this attention worker stopped", code="draining"))
            raise
        if sums is not None:
            self.waits.took(loop.time() - started)
        round_.settle(sums, contributions)


def _key(layer: int, contribution: Contribution) -> Hashable:
    hidden, route = contribution.hidden, contribution.route
    epoch, live = route.placement.epoch, tuple(route.live)
    return layer, epoch, live, hidden.shape[1], hidden.dtype
