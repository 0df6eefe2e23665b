"""Scoring that stores no KV: prompts are swept, layer by layer; pure (events in, decisions out).

A sweep takes all its rows through a layer before any goes through the next. So of their keys and
values one layer's are kept, beside the rows' hidden states, and only until the next layer: the area
that this takes is apart from the KV cache, nothing in it is found by others, and nothing of the
cache is looked for. A sweep runs as slices, some rows of one layer at a time, each of them a step
of its own; between two slices anything may happen.

A short prompt shares its sweep with others, a long one has its own. A few sweeps are under way at
once and take turns, so that short ones do not wait for the end of a long one.
"""

from collections import deque
from dataclasses import dataclass, field, replace

from moesaic.engine.blocks import BLOCK_SIZE, BlockPool, blocks_for
from moesaic.engine.requests import Scoring
from moesaic.engine.sequences import Chunk, Score, Work
from moesaic.engine.waiting import WaitingQueue

MOST_SWEEPS = 2  # at once


@dataclass(eq=False)
class Sweep:
    """Some requests on their way through the layers."""

    works: list[Score]  # those that have not ended
    chunks: list[Chunk]  # all rows: of each request the prompt, then the candidates
    left: list[Chunk]  # those of them that have not passed the layer
    layer: int = 0


@dataclass(frozen=True)
class Slice:
    """One step of a sweep: rows of one layer, none if those that were left have been cancelled."""

    sweep: Sweep
    chunks: list[Chunk] = field(default_factory=list)
    left: list[Chunk] = field(default_factory=list)  # what will not have passed the layer then

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

    def __init__(self, num_blocks: int, num_layers: int, slice_rows: int) -> None:
        """There is an area of ``num_blocks`` blocks; a slice has at most ``slice_rows`` rows."""
        self.area = BlockPool(num_blocks)
        self.waiting = WaitingQueue()
        self._num_layers, self._slice_rows = num_layers, slice_rows
        self._under_way: deque[Sweep] = deque()  # whose turn it is comes first
        self._owed = 0  # rows times layers that others have had and sweeps have not

    @property
    def running(self) -> list[Score]:
        """The work that has room in the area."""
        return [work for sweep in self._under_way for work in sweep.works]

    def drop(self, work: Score) -> None:
        """Forget ``work``, which is here, and free its blocks. Its rows are left out from now on."""
        work.release(self.area)
        for sweep in self._under_way:
            if work in sweep.works:
                sweep.works.remove(work)
                break
        else:
            self.waiting.remove(work)
        self._under_way = deque(sweep for sweep in self._under_way if sweep.works)

    def others_had(self, num_rows: int) -> None:
        """A step of other work is about to run: sweeps get as much, and at least one slice."""
        self._owed = max(1, num_rows * self._num_layers)

    def next_slice(self) -> Slice | None:
        """The next step, if it is the turn of a sweep. Blocks are taken; nothing else changes until
        the slice is reported done."""
        if not self._owed:
            return None
        self._admit()
        if not self._under_way:
            return None
        sweep, budget = self._under_way[0], self._slice_rows
        left = deque(chunk for chunk in sweep.left if chunk.owner in sweep.works)
        chunks = []
        while left and budget:
            chunk = left.popleft()
            if len(chunk.token_ids) > budget:
                left.appendleft(_rows(chunk, budget, len(chunk.token_ids)))
                chunk = _rows(chunk, 0, budget)
            chunks.append(chunk)
            budget -= len(chunk.token_ids)
        return Slice(sweep, chunks, list(left))

    def advance(self, done: Slice) -> bool:
        """The rows of a slice have passed their layer; whether its sweep has passed all layers."""
        sweep = done.sweep
        self._owed = max(0, self._owed - done.num_rows)
        sweep.left = done.left
        if not sweep.left:
            sweep.layer += 1
            sweep.left = sweep.chunks
        if sweep in self._under_way:
            self._under_way.rotate(-1)
        return sweep.layer == self._num_layers

    def _admit(self) -> None:
        """Begin sweeps, in the order of the queue, as far as there is room."""
        while self.waiting and len(self._under_way) < MOST_SWEEPS:
            works: list[Score] = []
            chunks: list[Chunk] = []
            num_rows = 0
            for work in self.waiting:
                assert isinstance(work, Score)
                rows = num_rows_of(len(work.tokens), work.work)
                if works and num_rows + rows > self._slice_rows:
                    break
                if blocks_to_sweep(len(work.tokens), work.work) > self.area.num_free:
                    break
                num_rows += rows
                works.append(work)
                chunks.extend(_lay_out(work, self.area))
            if not works:
                return
            for work in works:
                self.waiting.remove(work)
            self._under_way.append(Sweep(works, chunks, chunks))


def num_rows_of(num_tokens: int, scoring: Scoring) -> int:
    """Rows that a sweep computes for a prompt of ``num_tokens`` and its candidates."""
    tail = num_tokens % BLOCK_SIZE
    return num_tokens + sum(tail + len(c) - 1 for c in scoring.candidates if len(c) > 1)


def blocks_to_sweep(num_tokens: int, scoring: Scoring) -> int:
    """Blocks that a prompt of ``num_tokens`` and its candidates take in the area."""
    tail = num_tokens % BLOCK_SIZE
    siblings = (blocks_for(tail + len(c) - 1) for c in scoring.candidates if len(c) > 1)
    return blocks_for(num_tokens) + sum(siblings)


def _lay_out(work: Score, area: BlockPool) -> list[Chunk]:
    """Take blocks for all the rows of ``work``, and say which row goes where.

    A candidate of several tokens is a sequence behind the prompt's full blocks. It computes the
    prompt's last tokens again, those in a block that is partly filled, rather than copy them: in
    every layer they come out as before.
    """
    tokens = list(work.tokens)
    work.blocks = area.take(blocks_for(len(tokens)))
    chunks = [Chunk(work, tokens, 0, work.blocks, wanted=1)]
    full = len(tokens) // BLOCK_SIZE
    tail = tokens[full * BLOCK_SIZE :]
    for idx, candidate in enumerate(work.work.candidates):
        if len(candidate) > 1:
            rows = [*tail, *candidate[:-1]]
            lane = area.take(blocks_for(len(rows)))
            work.lanes.append(lane)
            table = [*work.blocks[:full], *lane]
            wanted = len(candidate) - 1
            chunks.append(Chunk(work, rows, full * BLOCK_SIZE, table, wanted, candidate=idx))
    return chunks


def _rows(chunk: Chunk, begin: int, end: int) -> Chunk:
    return replace(chunk, token_ids=chunk.token_ids[begin:end], start=chunk.start + begin)
