"""Scoring that stores no KV: prompts are swept through the model, layer by layer. Pure.

A sweep takes all its rows through a layer before any goes through the next. So it keeps the keys and
values of one layer, until the next, and the rows' hidden states. They lie in an area apart from the
KV cache: others find nothing in it, and a sweep looks for nothing in the cache.

A sweep runs as slices, some rows of one layer at a time. Each slice is a step of its own, and
anything may happen between two of them. A short prompt shares its sweep with others, a long one with
those that begin as it does. A few sweeps run at once and take turns, so that short ones
do not wait for the end of a long one.

Prompts of one sweep that begin alike share the blocks of their beginning. Its rows are computed once
in every layer, for as long as one of these prompts is there, even if another one brought them.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile

from moesaic.engine.sequences.blocks import BlockPool, blocks_for
from moesaic.engine.sequences.requests import ScoringTask
from moesaic.engine.sequences.sequence import AnySequence, Chunk, ScoringSequence, reusable
from moesaic.engine.steps.queues import WaitingQueue
from moesaic.fairness import Claim, Shares
from moesaic.prefix.blocks import BLOCK_SIZE
from moesaic.prefix.flops import ModelFlops

MOST_SWEEPS = 2  # at once
LEAST_ROWS = BLOCK_SIZE  # in a slice, however long that takes: fewer would not be quicker by much
SLICE_S = 0.5  # that a slice may take, since nothing else happens meanwhile
NUM_TIMED = 4  # slices whose speed is known; the fastest counts, so that a hiccup does not
ROWS_ALONE = ModelFlops([], 1, 0)  # every row costs the same


@dataclass(frozen=True)
class SweepPart:
    """Consecutive rows of one sequence, computed for as long as one of ``users`` is there."""

    chunk: Chunk
    users: tuple[ScoringSequence, ...]

    def split(self, count: int) -> tuple["SweepPart", "SweepPart"]:
        """Cut it into its first ``count`` rows and the others."""
        first, rest = self.chunk.split(count)
        return replace(self, chunk=first), replace(self, chunk=rest)


@dataclass(eq=False)
class Sweep:
    """Some sequences on their way through the layers.

    Attributes:
        sequences: those that have not ended.
        parts: all rows, a beginning before what continues it, a prompt before its candidates.
        left: those of them that have not passed the layer.
        layer: index of the decoder layer that they are passing.
        num_rows: of all sequences that ever joined.
        num_passed: rows that were computed, once for each layer.
        num_told: of these, when progress was last told.
    """

    sequences: list[ScoringSequence] = field(default_factory=list)
    parts: list[SweepPart] = field(default_factory=list)
    left: list[SweepPart] = field(default_factory=list)
    layer: int = 0
    num_rows: int = 0
    num_passed: int = 0
    num_told: int = 0
    _first_rows: int = 0  # of the sequence that it began with
    # Full blocks by their names and by what their rows were promised at least.
    _found: dict[tuple[bytes, float], int] = field(default_factory=dict)

    @property
    def may_be_degraded(self) -> bool:
        """False if its sequences want something that is not always to be had."""
        return _may_be_degraded(self.sequences[0])

    @property
    def wanted(self) -> list[Chunk]:
        """Chunks with rows whose logits are wanted."""
        return [part.chunk for part in self.parts if part.chunk.wanted]

    def live(self, part: SweepPart) -> bool:
        """True if a sequence that has not ended wants these rows."""
        return any(user in self.sequences for user in part.users)

    def shared_blocks(self, sequence: ScoringSequence) -> list[int]:
        """List the blocks of ``sequence`` that others here have as well, from its beginning on."""
        shared = []
        for name in reusable(sequence):
            if (block := self._found.get((name, sequence.request.min_threshold))) is None:
                break
            shared.append(block)
        return shared

    def is_like(self, sequence: ScoringSequence) -> bool:
        """False if one of its sequences may have to wait for experts while ``sequence`` goes on, or the other way."""
        return not self.sequences or self.may_be_degraded == _may_be_degraded(sequence)

    def takes(self, sequence: ScoringSequence, num_free: int, most_rows: int) -> bool:
        """True if ``sequence`` may join: its blocks fit into ``num_free``, and one of three holds.

        - It is the first.
        - The sweep then has at most ``most_rows`` rows.
        - It brings no more rows than it shares, and those that joined the first bring at most
          ``most_rows`` together.
        """
        shared = len(self.shared_blocks(sequence))
        if blocks_to_sweep(len(sequence.tokens), sequence.task) - shared > num_free:
            return False
        rows = num_rows_of(len(sequence.tokens), sequence.task) - shared * BLOCK_SIZE
        if not self.sequences or self.num_rows + rows <= most_rows:
            return True
        joined = self.num_rows - self._first_rows
        return rows <= shared * BLOCK_SIZE and joined + rows <= most_rows

    def join(self, sequence: ScoringSequence, area: BlockPool) -> None:
        """Take blocks for all rows of ``sequence``, and add the rows that are not there.

        A candidate of several tokens runs behind the prompt's full blocks. It computes again the
        prompt's last tokens, in a partly filled block, rather than copy them: in every layer they
        come out as before.
        """
        assert not self.layer
        tokens, shared = list(sequence.tokens), self.shared_blocks(sequence)
        area.share(shared)
        sequence.blocks = [*shared, *area.take(blocks_for(len(tokens)) - len(shared))]
        start = sequence.num_cached = len(shared) * BLOCK_SIZE
        self.parts, self.left = (_used(parts, sequence, start) for parts in (self.parts, self.left))
        chunks = [Chunk(sequence, tokens[start:], start, sequence.blocks, wanted=1)]
        full = len(tokens) // BLOCK_SIZE
        tail = tokens[full * BLOCK_SIZE :]
        for idx, candidate in enumerate(sequence.task.candidates):
            if len(candidate) > 1:
                rows = [*tail, *candidate[:-1]]
                lane = area.take(blocks_for(len(rows)))
                sequence.lanes.append(lane)
                table = [*sequence.blocks[:full], *lane]
                wanted = len(candidate) - 1
                chunks.append(
                    Chunk(sequence, rows, full * BLOCK_SIZE, table, wanted, candidate=idx)
                )
        self.sequences.append(sequence)
        fresh = [SweepPart(chunk, (sequence,)) for chunk in chunks]
        self.parts += fresh
        self.left += fresh
        self.num_rows += sum(len(chunk.token_ids) for chunk in chunks)
        self._first_rows = self._first_rows or self.num_rows
        self._found.update(_named(sequence))

    def leave(self, sequence: ScoringSequence) -> None:
        """Go on without ``sequence``; the caller gives its blocks back."""
        self.sequences.remove(sequence)
        self._found = {key: block for other in self.sequences for key, block in _named(other)}

    def computed_tokens(self, sequence: ScoringSequence, num_layers: int) -> int:
        """Return how many of a prompt's tokens would be done, were it computed token by token.

        Never all, since the sweep goes on.
        """
        done = len(sequence.tokens) * self.num_passed // max(1, self.num_rows * num_layers)
        return min(done, len(sequence.tokens) - 1)


def _may_be_degraded(sequence: ScoringSequence) -> bool:
    return not sequence.request.min_threshold


def _named(sequence: ScoringSequence) -> Iterator[tuple[tuple[bytes, float], int]]:
    """Name the full blocks of a sequence. Requests that want more do not get what others were promised."""
    least = sequence.request.min_threshold
    for name, block in zip(sequence.hashes, sequence.blocks, strict=False):
        yield (name, least), block


def num_rows_of(num_tokens: int, scoring: ScoringTask) -> int:
    """Count the rows of a prompt of ``num_tokens`` and its candidates, if it shares none."""
    tail = num_tokens % BLOCK_SIZE
    return num_tokens + sum(tail + len(c) - 1 for c in scoring.candidates if len(c) > 1)


def blocks_to_sweep(num_tokens: int, scoring: ScoringTask) -> int:
    """Count the blocks of a prompt of ``num_tokens`` and its candidates, if it shares none."""
    tail = num_tokens % BLOCK_SIZE
    siblings = (blocks_for(tail + len(c) - 1) for c in scoring.candidates if len(c) > 1)
    return blocks_for(num_tokens) + sum(siblings)


def _used(parts: list[SweepPart], sequence: ScoringSequence, end: int) -> list[SweepPart]:
    """Add ``sequence`` to the users of those rows before position ``end`` that lie in its blocks."""
    out = []
    for part in parts:
        chunk = part.chunk
        first = chunk.start // BLOCK_SIZE
        alike = takewhile(
            lambda pair: pair[0] == pair[1],
            zip(chunk.block_table[first:], sequence.blocks[first:], strict=False),
        )
        until = min(end, (first + sum(1 for _ in alike)) * BLOCK_SIZE)
        if chunk.candidate is not None or until <= chunk.start:
            out.append(part)
            continue
        others: list[SweepPart] = []
        if until < chunk.start + len(chunk.token_ids):
            part, rest = part.split(until - chunk.start)
            others = [rest]
        out += [replace(part, users=(*part.users, sequence)), *others]
    return out


@dataclass(frozen=True)
class Slice:
    """One step of a sweep: rows of one layer; none if all that were left have been cancelled."""

    sweep: Sweep
    chunks: list[Chunk] = field(default_factory=list)
    users: list[tuple[AnySequence, ...]] = field(default_factory=list)  # of each chunk's rows
    # Parts that have yet to pass the layer then.
    left: list[SweepPart] = field(default_factory=list)
    flops: int = 0  # as if they passed all layers

    @property
    def layer(self) -> int:
        """Index of the decoder layer."""
        return self.sweep.layer

    @cached_property
    def num_rows(self) -> int:
        """Number of rows that pass it."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def sequences(self) -> list[AnySequence]:
        """The sequences that fail if it does."""
        return [*self.sweep.sequences]


class Sweeps:
    """All requests of one engine that store no KV, from submission to their last event."""

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        slice_rows: int,
        flops: ModelFlops = ROWS_ALONE,
    ) -> None:
        """Begin with no sweep.

        Args:
            num_blocks: of the area.
            num_layers: that a sweep passes.
            slice_rows: rows of a slice, at most. It has no more FLOPs than a step of so many rows,
                and takes about ``SLICE_S`` at most.
            flops: of the model.
        """
        self.area = BlockPool(num_blocks)
        self.waiting = WaitingQueue()
        self._num_layers, self._slice_rows, self._flops = num_layers, slice_rows, flops
        self._most_flops = num_layers * flops.span(0, slice_rows)
        self._rates: deque[float] = deque(maxlen=NUM_TIMED)  # FLOPs a second, of the last slices
        self._active: deque[Sweep] = deque()  # the next in turn comes first
        self._shares = Shares()  # of the rows that joined
        self._owed = 0  # FLOPs that other work was given and sweeps were not, counted as in slices

    @property
    def running(self) -> list[ScoringSequence]:
        """The sequences that have room in the area."""
        return [sequence for sweep in self._active for sequence in sweep.sequences]

    def drop(self, sequence: ScoringSequence) -> None:
        """Forget ``sequence``, which is here, and free its blocks.

        Its rows are left out from now on, except those that others begin with as well.
        """
        sequence.release(self.area)
        for sweep in self._active:
            if sequence in sweep.sequences:
                sweep.leave(sequence)
                break
        else:
            self.waiting.remove(sequence)
        self._active = deque(sweep for sweep in self._active if sweep.sequences)

    def others_had(self, chunks: Iterable[Chunk]) -> None:
        """Take note that a step of other work is about to run: sweeps get as many FLOPs behind it,
        and at least one slice."""
        if self._active or self.waiting:
            flops = sum(self._cost(chunk, len(chunk.token_ids)) for chunk in chunks)
            self._owed = max(1, flops * self._num_layers)
        else:
            self._owed = 1

    def next_slice(
        self, holds: Callable[[AnySequence], bool] = lambda sequence: False
    ) -> Slice | None:
        """Return the next step, or None if it is not the turn of a sweep.

        Blocks are taken; nothing else changes until the slice is reported done. A sweep with a sequence
        that ``holds`` has no turn.
        """
        if not self._owed:
            return None
        self._admit(holds)
        for sweep in self._active:
            if not any(map(holds, sweep.sequences)):
                return self._cut(sweep)
        return None

    def _cut(self, sweep: Sweep) -> Slice:
        """Cut off as many of the rows that are left as a slice may have."""
        left = deque(part for part in sweep.left if sweep.live(part))
        chunks: list[Chunk] = []
        users: list[tuple[AnySequence, ...]] = []
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
            users.append(tuple(user for user in part.users if user in sweep.sequences))
            rows -= count
            flops += self._cost(chunk, count)
        return Slice(sweep, chunks, users, list(left), flops)

    def advance(self, done: Slice, took_s: float = 0.0) -> bool:
        """Take note that the rows of a slice passed their layer, in ``took_s`` if not 0.

        Returns:
            True if its sweep has passed all layers.
        """
        sweep = done.sweep
        # Most rows leave the last layer early: its speed would promise too much of the others.
        is_last = self._num_layers > 1 and done.layer == self._num_layers - 1
        if took_s > 0 and done.flops and not is_last:
            self._rates.append(done.flops / took_s)
        self._owed = max(0, self._owed - done.flops)
        sweep.left = done.left
        sweep.num_passed += done.num_rows
        if not sweep.left:
            sweep.layer += 1
            sweep.left = list(sweep.parts)
        if sweep in self._active:
            self._active.remove(sweep)
            self._active.append(sweep)
        return sweep.layer == self._num_layers

    def progress_of(self, sweep: Sweep) -> list[tuple[ScoringSequence, int]]:
        """Return how many tokens of each prompt are as good as done, now and then.

        Returns:
            Nothing until as much was computed as fills a largest step, since it was last told.
        """
        if sweep.num_passed - sweep.num_told < self._slice_rows * self._num_layers:
            return []
        sweep.num_told = sweep.num_passed
        return [
            (sequence, sweep.computed_tokens(sequence, self._num_layers))
            for sequence in sweep.sequences
        ]

    def _admit(self, holds: Callable[[AnySequence], bool]) -> None:
        """Have sequences join sweeps that are in their first layer, then begin further sweeps."""
        self._join_alike()
        turning = sum(not any(map(holds, sweep.sequences)) for sweep in self._active)
        while self.waiting and turning < MOST_SWEEPS:
            sweep, given = Sweep(), list[tuple[Claim, int]]()
            for sequence in self._in_turn():
                assert isinstance(sequence, ScoringSequence)
                if holds(sequence) or not sweep.is_like(sequence):
                    continue
                if not self._takes(sweep, sequence):
                    break
                given.append(self._join(sweep, sequence))
            if not sweep.sequences:
                return
            self._note_shares(given)
            self._active.append(sweep)
            turning += 1

    def _join_alike(self) -> None:
        """Have those join that begin like a sweep, tenants in turn, up to the first without room."""
        given: list[tuple[Claim, int]] = []
        for sequence in self._in_turn():
            assert isinstance(sequence, ScoringSequence)
            if blocks_to_sweep(len(sequence.tokens), sequence.task) > self.area.num_free:
                break
            for sweep in self._active:
                if (
                    not sweep.layer
                    and sweep.is_like(sequence)
                    and sweep.shared_blocks(sequence)
                    and self._takes(sweep, sequence)
                ):
                    given.append(self._join(sweep, sequence))
                    break
        self._note_shares(given)

    def _takes(self, sweep: Sweep, sequence: ScoringSequence) -> bool:
        return sweep.takes(sequence, self.area.num_free, self._slice_rows)

    def _in_turn(self) -> list[AnySequence]:
        return self._shares.in_turn(self.waiting, self._slice_rows)

    def _join(self, sweep: Sweep, sequence: ScoringSequence) -> tuple[Claim, int]:
        """Let ``sequence`` join.

        Returns:
            Its claim, and the rows that it was given.
        """
        self.waiting.remove(sequence)
        rows = sweep.num_rows
        sweep.join(sequence, self.area)
        return sequence.claim, sweep.num_rows - rows

    def _note_shares(self, given: list[tuple[Claim, int]]) -> None:
        """Remember the rows of all that joined, in one go, since many may wait."""
        if given:
            for claim, rows in given:
                self._shares.note(claim, rows)
            waiting = (other.claim for other in self.waiting)
            self._shares.served(given, waiting, self._slice_rows)

    def _budget(self) -> int:
        """Return the FLOPs that the next slice may have."""
        if len(self._rates) < NUM_TIMED:
            return self._most_flops
        return min(self._most_flops, int(SLICE_S * max(self._rates)))

    def _affordable(self, chunk: Chunk, rows: int, budget: int) -> int:
        """Return how many of the first ``rows`` rows of a chunk fit into a budget."""
        rows = min(rows, len(chunk.token_ids))
        if self._cost(chunk, rows) <= budget:
            return rows
        return bisect_right(range(1, rows), budget, key=lambda count: self._cost(chunk, count))

    def _cost(self, chunk: Chunk, count: int) -> int:
        """Return the FLOPs of the first rows of a chunk, in all layers."""
        return self._flops.span(chunk.start, chunk.start + count)
