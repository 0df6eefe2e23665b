"""Phase 1: the rows of one node's attention workers, brought together layer by layer.

Workers step at their own pace, so rows are not collected from everybody: a round takes whatever is
offered for one layer while it is open. At a step's first layer it waits for the regulars, who began a
step lately, also if they are in the middle of one; at the others for those who were in the opener's
last round. It waits no longer than patience lasts, and whoever has stayed away is waited for no more
until it comes again: one without work costs one wait. Whoever is missed again and again, for it keeps
another pace, may come twice, four times, up to 64 times before it is waited for once more. Workers that
begin a step together stay together, for the sums of a round reach all of them at once.

Of one worker, several batches of a step may be under way at once. Each has a lane: its number among
the step's batches. Rounds are of one lane, so that the batches of a worker never wait for each other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field

import structlog
from torch import Tensor

from moesaic.dispatch.exchange.judge import Went
from moesaic.dispatch.exchange.sending import Reach
from moesaic.errors import MoesaicError, NotReady

log = structlog.get_logger()

_ROUND_SHARE = 0.5  # of what a round takes to its sums: so long may one be behind
_STEP_SHARE = (
    1.0  # the same before the first layer, of a step: whoever is in the middle of one will come
)
_PATIENCE_S = (0.0005, 2.0)  # the least and the most
_IDLE_S = 4.0  # no step takes so long
_FADES = 0.8  # what a round's time weighs after the next one

_MOST_MISSED = 6

_Place = tuple[str, int]  # a worker, and one of its lanes


@dataclass(eq=False)
class Offer:
    """One worker's rows for one layer, and who waits for their sum."""

    worker_id: str
    hidden: Tensor  # [n, H]
    reach: Reach
    lane: int = 0
    company: int = 0  # workers in its round, once that has left
    went: Went | None = None  # how it left
    sums: "asyncio.Future[Tensor]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(eq=False)
class _Round:
    """Offers for one layer, until they leave together."""

    key: Hashable
    layer: int
    lane: int
    first: bool  # of a step's layers
    awaited: set[str]
    offers: list[Offer] = field(default_factory=list)
    closing: asyncio.TimerHandle | None = None  # set once it is open


class Gathering:
    """Opens and closes rounds. Lives on the engine thread's event loop."""

    def __init__(
        self, send: Callable[[int, list[Offer]], Awaitable[Tensor]], max_rows: int
    ) -> None:
        """Gather for ``send``, which returns the sums of all rows in the order of the offers.

        Args:
            send: takes a layer, and offers by worker id.
            max_rows: of a round, unless one worker alone has more.
        """
        self._send, self._max_rows = send, max_rows
        self._open: dict[Hashable, _Round] = {}
        self._regulars: dict[int, set[str]] = {}  # by lane
        self._companions: dict[_Place, frozenset[str]] = {}  # who was in its last round
        # First layers at which it was waited for in vain, since it met others.
        self._missed: dict[_Place, int] = {}
        self._passes: dict[_Place, int] = {}  # how often it may come before it is waited for again
        self._round_s = self._step_s = 0.0  # what rounds take to their sums, and steps
        self._began_s: dict[_Place, float] = {}  # when its step did
        self._running: set[asyncio.Task[None]] = set()

    @property
    def regulars(self) -> frozenset[str]:
        """Who is waited for at a step's first layer, in the first lane."""
        return frozenset(self._regulars.get(0, ()))

    def patience_s(self, first: bool) -> float:
        """How long a round stays open for those who are missing; ``first`` of a step's layers?"""
        least, most = _PATIENCE_S
        usual_s = _STEP_SHARE * self._step_s if first else _ROUND_SHARE * self._round_s
        return min(most, max(least, usual_s))

    async def join(self, layer: int, offer: Offer) -> Tensor:
        """Put rows into the round for ``layer``, and wait for their sums.

        Only rows that the same experts can be asked for together share a round.

        Raises:
            MoesaicError: the exchange failed for the whole round.
        """
        key = _key(layer, offer)
        round_ = self._open.get(key)
        if round_ is not None and _rows(round_) + len(offer.hidden) > self._max_rows:
            self._close(round_)
            round_ = None
        if round_ is None:
            loop = asyncio.get_running_loop()
            first = layer == min(offer.reach.targets)
            awaited = (
                self._regulars.get(offer.lane, ())
                if first
                else self._companions.get((offer.worker_id, offer.lane), ())
            )
            round_ = _Round(key, layer, offer.lane, first, set(awaited))
            round_.closing = loop.call_later(self.patience_s(first), self._close, round_)
            self._open[key] = round_
        round_.offers.append(offer)
        self._learn_step(layer, offer)
        if round_.first:
            self._expect(offer.worker_id, offer.lane)
        for other in list(self._open.values()):
            if other is round_ or (other.lane == offer.lane and not other.first):
                other.awaited.discard(offer.worker_id)
            if not other.awaited:
                self._close(other)
        return await offer.sums

    def pass_by(self, worker_id: str) -> None:
        """It goes another way; whoever waits for it need not."""
        for round_ in list(self._open.values()):
            round_.awaited.discard(worker_id)
            if not round_.awaited:
                self._close(round_)

    def keep(self, workers: Collection[str]) -> None:
        """Know only these workers from now on, and wait for nobody else; others may come again."""
        self._regulars = {lane: known & set(workers) for lane, known in self._regulars.items()}
        self._companions = {
            place: known & set(workers)
            for place, known in self._companions.items()
            if place[0] in workers
        }
        for known in (self._missed, self._passes, self._began_s):
            for place in [place for place in known if place[0] not in workers]:
                del known[place]
        for round_ in list(self._open.values()):
            round_.awaited &= set(workers)
            if not round_.awaited:
                self._close(round_)

    async def close(self) -> None:
        """Fail the rounds that are open, and end those that run."""
        for round_ in list(self._open.values()):
            self._open.pop(round_.key)
            if round_.closing is not None:
                round_.closing.cancel()
            _fail(round_, NotReady("this attention worker stopped", code="draining"))
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _close(self, round_: _Round) -> None:
        if self._open.get(round_.key) is not round_:
            return
        del self._open[round_.key]
        if round_.closing is not None:
            round_.closing.cancel()
        together = frozenset(offer.worker_id for offer in round_.offers)
        for worker_id in together:
            self._companions[worker_id, round_.lane] = together
        if round_.first:
            self._note_who_came(round_, together)
        task = asyncio.get_running_loop().create_task(self._run(round_))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _expect(self, worker_id: str, lane: int) -> None:
        """It has begun a step, and will begin another."""
        place = worker_id, lane
        regulars = self._regulars.setdefault(lane, set())
        if self._passes.get(place, 0) > 0:
            self._passes[place] -= 1
        else:
            regulars.add(worker_id)

    def _note_who_came(self, round_: _Round, together: Collection[str]) -> None:
        """Who keeps another pace is waited for in vain ever more seldom."""
        lane = round_.lane
        self._regulars[lane] -= round_.awaited
        for worker_id in round_.awaited:
            missed = self._missed.get((worker_id, lane), 0)
            self._missed[worker_id, lane] = min(missed + 1, _MOST_MISSED)
            self._passes[worker_id, lane] = (1 << missed) - 1
        if len(together) > 1:
            self._regulars[lane].update(together)
            for worker_id in together:
                self._missed.pop((worker_id, lane), None)
                self._passes.pop((worker_id, lane), None)

    def _learn_step(self, layer: int, offer: Offer) -> None:
        """A step takes from its first layer to its last one, and a round more: behind it there may be a
        pause."""
        place, layers = (offer.worker_id, offer.lane), offer.reach.targets
        now_s = asyncio.get_running_loop().time()
        if layer == min(layers):
            self._began_s[place] = now_s
        if layer == max(layers) and place in self._began_s:
            took_s = now_s - self._began_s.pop(place) + self._round_s
            if took_s < _IDLE_S:
                self._step_s = _faded(self._step_s, took_s)

    async def _run(self, round_: _Round) -> None:
        loop = asyncio.get_running_loop()
        offers = sorted(round_.offers, key=lambda offer: offer.worker_id)
        workers = {offer.worker_id for offer in offers}
        for offer in offers:
            offer.company = len(workers)
        started = loop.time()
        try:
            sums = await self._send(round_.layer, offers)
        except MoesaicError as error:
            _fail(round_, error)
            return
        except Exception:
            log.exception("exchange.broken", layer=round_.layer)
            _fail(round_, MoesaicError("the exchange failed; see the log"))
            return
        except BaseException:  # this worker stops
            _fail(round_, NotReady("this attention worker stopped", code="draining"))
            raise
        self._round_s = _faded(self._round_s, loop.time() - started)
        start = 0
        for offer in offers:
            end = start + len(offer.hidden)
            if not offer.sums.done():  # who offered may have gone
                offer.sums.set_result(sums[start:end])
            start = end


def _key(layer: int, offer: Offer) -> Hashable:
    hidden = offer.hidden
    epoch, live = offer.reach.placement.epoch, tuple(offer.reach.live)
    return layer, offer.lane, epoch, live, hidden.shape[1], hidden.dtype


def _faded(known_s: float, new_s: float) -> float:
    return _FADES * known_s + (1 - _FADES) * new_s if known_s else new_s


def _rows(round_: _Round) -> int:
    return sum(len(offer.hidden) for offer in round_.offers)


def _fail(round_: _Round, error: MoesaicError) -> None:
    for offer in round_.offers:
        if not offer.sums.done():
            offer.sums.set_exception(error)
            offer.sums.exception()  # who offered may have gone
