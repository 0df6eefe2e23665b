"""Scoring that stores no KV: prompts are swept, layer by layer; pure (events in, decisions out).

A sweep takes all its rows through a layer before any goes through the next. So of their keys and
values one layer's are kept, beside the rows' hidden states, and only until the next layer: the area
that this takes is apart from the KV cache, nothing in it is found by others, and nothing of the
cache is looked for. A sweep runs as slices, some rows of one layer at a time, each of them a step
of its own; between two slices anything may happen.

A short prompt shares its sweep with others, a long one with those that begin as it does. A few
sweeps are under way at once and take turns, so that short ones do not wait for the end of a long one.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from moesaic.engine.blocks import BLOCK_SIZE, BlockPool
from moesaic.engine.sequences import Chunk, Score, Work
from moesaic.engine.sweep_rows import Part, Sweep, blocks_to_sweep
from moesaic.engine.waiting import WaitingQueue
from moesaic.fairness import Claim, Shares
from moesaic.prefix.flops import ModelFlops

MOST_SWEEPS = 2  # at once
LEAST_ROWS = BLOCK_SIZE  # in a slice, however long that takes: fewer would not be quicker by much
SLICE_S = 0.5  # what a slice should not take longer than: nothing else happens meanwhile
NUM_TIMED = 4  # slices that say how fast they are; the fastest counts, so that a hiccup does not
ROWS_ALONE = ModelFlops([], 1, 0)  # every row costs the same


@dataclass(frozen=True)
class Slice:
    """One step of a sweep: rows of one layer, none if those that were left have been cancelled."""

    sweep: Sweep
    chunks: list[Chunk] = field(default_factory=list)
    left: list[Part] = field(default_factory=list)  # what will not have passed the layer then
    flops: int = 0  # as if they passed all layers

    @property
    def layer(self) -> int:
        """Index of the decoder layer."""
        return self.sweep.layer

    @property
    def num_rows(self) -> int:
        """How many rows pass it."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def owners(self) -> list[Work]:
        """Whose work fails with it."""
        return [*self.sweep.works]


class Sweeps:
    """All requests of one engine that store no KV, from submission to their last event."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        slice_rows: int,
        flops: ModelFlops = ROWS_ALONE,
    ) -> None:
        """There is an area of ``num_blocks`` blocks; a slice has at most ``slice_rows`` rows. It has
        no more ``flops`` than a step of so many rows, and takes about ``SLICE_S`` at most."""
        self.area = BlockPool(num_blocks)
        self.waiting = WaitingQueue()
        self._num_layers, self._slice_rows, self._flops = num_layers, slice_rows, flops
        self._most_flops = num_layers * flops.span(0, slice_rows)
        self._rates: deque[float] = deque(maxlen=NUM_TIMED)  # FLOPs a second, of the last slices
        self._under_way: deque[Sweep] = deque()  # whose turn it is comes first
        self._shares = Shares()  # of the rows that joined
        self._owed = 0  # FLOPs that others have had and sweeps have not, in the measure of slices

    @property
    def running(self) -> list[Score]:
        """The work that has room in the area."""
        return [work for sweep in self._under_way for work in sweep.works]

    def drop(self, work: Score) -> None:
        """Forget ``work``, which is here, and free its blocks. Its rows are left out from now on,
        but for those that others begin with as well."""
        work.release(self.area)
        for sweep in self._under_way:
            if work in sweep.works:
                sweep.leave(work)
                break
        else:
            self.waiting.remove(work)
        self._under_way = deque(sweep for sweep in self._under_way if sweep.works)

    def others_had(self, chunks: Iterable[Chunk]) -> None:
        """A step of other work is about to run: sweeps get as much, and at least one slice."""
        if self._under_way or self.waiting:
            flops = sum(self._cost(chunk, len(chunk.token_ids)) for chunk in chunks)
            self._owed = max(1, flops * self._num_layers)
        else:
            self._owed = 1

    def next_slice(self) -> Slice | None:
        """The next step, if it is the turn of a sweep. Blocks are taken; nothing else changes until
        the slice is reported done."""
        if not self._owed:
            return None
        self._admit()
        if not self._under_way:
            return None
        sweep = self._under_way[0]
        left = deque(part for part in sweep.left if sweep.live(part))
        chunks: list[Chunk] = []
        rows, budget = self._slice_rows, self._budget()
        flops = 0
        while left and rows:
            chunk = left[0].chunk
            least = LEAST_ROWS - (self._slice_rows - rows)
            count = max(self._affordable(chunk, rows, budget - flops), min(least, rows))
            count = min(count, len(chunk.token_ids))
            if not count:
                break
            part = left.popleft()
            if count < len(chunk.token_ids):
                part, others = part.split(count)
                left.appendleft(others)
            chunks.append(part.chunk)
            rows -= count
            flops += self._cost(chunk, count)
        return Slice(sweep, chunks, list(left), flops)

    def advance(self, done: Slice, took_s: float = 0.0) -> bool:
        """The rows of a slice have passed their layer, in ``took_s`` if that is known; whether its
        sweep has passed all layers."""
        sweep = done.sweep
        # Most rows leave the last layer early: it would promise too much of the others.
        is_last = self._num_layers > 1 and done.layer == self._num_layers - 1
        if took_s > 0 and done.flops and not is_last:
            self._rates.append(done.flops / took_s)
        self._owed = max(0, self._owed - done.flops)
        sweep.left = done.left
        sweep.num_passed += done.num_rows
        if not sweep.left:
            sweep.layer += 1
            sweep.left = list(sweep.parts)
        if sweep in self._under_way:
            self._under_way.rotate(-1)
        return sweep.layer == self._num_layers

    def progress_of(self, sweep: Sweep) -> list[tuple[Score, int]]:
        """How many tokens of each prompt are as good as done, if there is reason to tell: since it
        was last told, as much has been computed as fills a largest step."""
        if sweep.num_passed - sweep.num_told < self._slice_rows * self._num_layers:
            return []
        sweep.num_told = sweep.num_passed
        return [(work, sweep.computed_tokens(work, self._num_layers)) for work in sweep.works]

    def _admit(self) -> None:
        """Begin sweeps, tenants in turn, as far as there is room. Before that, those that begin like
        a sweep that is in its first layer join it, unless somebody before them waits for room."""
        given: list[tuple[Claim, int]] = []
        for work in self._in_turn():
            assert isinstance(work, Score)
            if blocks_to_sweep(len(work.tokens), work.work) > self.area.num_free:
                break
            for sweep in self._under_way:
                if not sweep.layer and sweep.shared_blocks(work) and self._takes(sweep, work):
                    given.append(self._join(sweep, work))
                    break
        self._note_shares(given)
        while self.waiting and len(self._under_way) < MOST_SWEEPS:
            sweep, given = Sweep(), []
            for work in self._in_turn():
                assert isinstance(work, Score)
                if not self._takes(sweep, work):
                    break
                given.append(self._join(sweep, work))
            if not sweep.works:
                return
            self._note_shares(given)
            self._under_way.append(sweep)

    def _takes(self, sweep: Sweep, work: Score) -> bool:
        return sweep.takes(work, self.area.num_free, self._slice_rows)

    def _in_turn(self) -> list[Work]:
        return self._shares.in_turn(self.waiting, self._slice_rows)

    def _join(self, sweep: Sweep, work: Score) -> tuple[Claim, int]:
        """Let ``work`` join; says what it was given, in rows."""
        self.waiting.remove(work)
        rows = sweep.num_rows
        sweep.join(work, self.area)
        return work.claim, sweep.num_rows - rows

    def _note_shares(self, given: list[tuple[Claim, int]]) -> None:
        """Remember who was given what, once for all that joined, since many may wait."""
        if given:
            for claim, rows in given:
                self._shares.note(claim, rows)
            waiting = (other.claim for other in self.waiting)
            self._shares.served(given, waiting, self._slice_rows)

    def _budget(self) -> int:
        """FLOPs that the next slice may have."""
        if len(self._rates) < NUM_TIMED:
            return self._most_flops
        return min(self._most_flops, int(SLICE_S * max(self._rates)))

    def _affordable(self, chunk: Chunk, rows: int, budget: int) -> int:
        """How many of the first ``rows`` rows of a chunk a budget is enough for."""
        rows = min(rows, len(chunk.token_ids))
        if self._cost(chunk, rows) <= budget:
            return rows
        return bisect_right(range(1, rows), budget, key=lambda count: self._cost(chunk, count))

    def _cost(self, chunk: Chunk, count: int) -> int:
        """FLOPs of the first rows of a chunk, in all layers."""
        return self._flops.span(chunk.start, chunk.start + count)
