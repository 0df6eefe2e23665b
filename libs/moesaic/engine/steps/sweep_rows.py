"""The rows of a sweep, the blocks where they lie, and the sequences that still want them.

Prompts of one sweep that begin alike share the blocks of their beginning. Its rows are computed once
in every layer, for as long as one of these prompts is there, even if another one brought them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile

from moesaic.engine.sequences.blocks import BlockPool, blocks_for
from moesaic.engine.sequences.requests import ScoringTask
from moesaic.engine.sequences.sequence import Chunk, ScoringSequence, reusable
from moesaic.prefix.block_hashes import BLOCK_SIZE


@dataclass(frozen=True)
class SweepPart:
    """Consecutive rows of one sequence, computed for as long as one of ``users`` is there."""

    chunk: Chunk
    users: tuple[ScoringSequence, ...]

    def split(self, count: int) -> tuple["SweepPart", "SweepPart"]:
        """Cut it into its first ``count`` rows and the others."""
        chunk, position = self.chunk, self.chunk.start + count
        tokens, others = chunk.token_ids[:count], chunk.token_ids[count:]
        wanted = min(chunk.wanted, len(others))
        first = replace(chunk, token_ids=tokens, wanted=chunk.wanted - wanted)
        rest = replace(chunk, token_ids=others, start=position, wanted=wanted)
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
