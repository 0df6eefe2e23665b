"""The rows of a sweep: which there are, where they lie, and who still wants them.

Prompts of one sweep that begin alike share the blocks of their beginning: its rows are computed once
in every layer, as long as one of those that begin so is there, whoever brought them.
"""

from dataclasses import dataclass, field, replace
from itertools import takewhile

from moesaic.engine.blocks import BLOCK_SIZE, BlockPool, blocks_for
from moesaic.engine.requests import Scoring
from moesaic.engine.sequences import Chunk, Score, reusable


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one sequence; they are computed while one of ``users`` is there."""

    chunk: Chunk
    users: tuple[Score, ...]

    def split(self, count: int) -> tuple["Part", "Part"]:
        """Its first ``count`` rows, and the others."""
        chunk, position = self.chunk, self.chunk.start + count
        tokens, others = chunk.token_ids[:count], chunk.token_ids[count:]
        wanted = min(chunk.wanted, len(others))
        first = replace(chunk, token_ids=tokens, wanted=chunk.wanted - wanted)
        rest = replace(chunk, token_ids=others, start=position, wanted=wanted)
        return replace(self, chunk=first), replace(self, chunk=rest)


@dataclass(eq=False)
class Sweep:
    """Some requests on their way through the layers.

    Attributes:
        works: those that have not ended.
        parts: all rows, a beginning before what continues it, a prompt before its candidates.
        left: those of them that have not passed the layer.
        num_rows: of all that ever joined.
        num_passed: rows that were computed, once for each layer.
    """

    works: list[Score] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    left: list[Part] = field(default_factory=list)
    layer: int = 0
    num_rows: int = 0
    num_passed: int = 0
    num_told: int = 0  # of these, when progress was last told
    _first_rows: int = 0  # of the one that it began with
    _found: dict[bytes, int] = field(default_factory=dict)  # where a full block is, by its name

    @property
    def wanted(self) -> list[Chunk]:
        """The chunks that have rows whose logits are wanted."""
        return [part.chunk for part in self.parts if part.chunk.wanted]

    def live(self, part: Part) -> bool:
        """Whether somebody still wants these rows."""
        return any(user in self.works for user in part.users)

    def shared_blocks(self, work: Score) -> list[int]:
        """The blocks of ``work`` that others here have as well, from its beginning on."""
        shared = []
        for name in reusable(work):
            if (block := self._found.get(name)) is None:
                break
            shared.append(block)
        return shared

    def takes(self, work: Score, num_free: int, most_rows: int) -> bool:
        """Whether ``work`` may join, with ``num_free`` blocks left: the first always may; those of a
        sweep of at most ``most_rows`` rows; and who brings no more rows than are there for it, so
        long as such do not bring more than that either."""
        shared = len(self.shared_blocks(work))
        if blocks_to_sweep(len(work.tokens), work.work) - shared > num_free:
            return False
        rows = num_rows_of(len(work.tokens), work.work) - shared * BLOCK_SIZE
        if not self.works or self.num_rows + rows <= most_rows:
            return True
        joined = self.num_rows - self._first_rows
        return rows <= shared * BLOCK_SIZE and joined + rows <= most_rows

    def join(self, work: Score, area: BlockPool) -> None:
        """Take blocks for all the rows of ``work``, and add those that are not there.

        A candidate of several tokens is a sequence behind the prompt's full blocks. It computes the
        prompt's last tokens again, those in a block that is partly filled, rather than copy them:
        in every layer they come out as before.
        """
        assert not self.layer
        tokens, shared = list(work.tokens), self.shared_blocks(work)
        area.share(shared)
        work.blocks = [*shared, *area.take(blocks_for(len(tokens)) - len(shared))]
        start = work.num_cached = len(shared) * BLOCK_SIZE
        self.parts, self.left = (_used(parts, work, start) for parts in (self.parts, self.left))
        chunks = [Chunk(work, tokens[start:], start, work.blocks, wanted=1)]
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
        self.works.append(work)
        fresh = [Part(chunk, (work,)) for chunk in chunks]
        self.parts += fresh
        self.left += fresh
        self.num_rows += sum(len(chunk.token_ids) for chunk in chunks)
        self._first_rows = self._first_rows or self.num_rows
        self._found.update(zip(work.hashes, work.blocks, strict=False))

    def leave(self, work: Score) -> None:
        """Go on without ``work``; its blocks are given back by the caller."""
        self.works.remove(work)
        self._found = {
            name: block
            for other in self.works
            for name, block in zip(other.hashes, other.blocks, strict=False)
        }

    def computed_tokens(self, work: Score, num_layers: int) -> int:
        """Tokens of a prompt that would be done, were it computed token by token; never all."""
        done = len(work.tokens) * self.num_passed // max(1, self.num_rows * num_layers)
        return min(done, len(work.tokens) - 1)


def num_rows_of(num_tokens: int, scoring: Scoring) -> int:
    """Rows that a sweep computes for a prompt of ``num_tokens`` and its candidates, if it shares
    none."""
    tail = num_tokens % BLOCK_SIZE
    return num_tokens + sum(tail + len(c) - 1 for c in scoring.candidates if len(c) > 1)


def blocks_to_sweep(num_tokens: int, scoring: Scoring) -> int:
    """Blocks that a prompt of ``num_tokens`` and its candidates take in the area, if it shares
    none."""
    tail = num_tokens % BLOCK_SIZE
    siblings = (blocks_for(tail + len(c) - 1) for c in scoring.candidates if len(c) > 1)
    return blocks_for(num_tokens) + sum(siblings)


def _used(parts: list[Part], work: Score, end: int) -> list[Part]:
    """The parts, with ``work`` as a user of those rows before position ``end`` that lie in its
    blocks."""
    out = []
    for part in parts:
        chunk = part.chunk
        first = chunk.start // BLOCK_SIZE
        alike = takewhile(
            lambda pair: pair[0] == pair[1],
            zip(chunk.block_table[first:], work.blocks[first:], strict=False),
        )
        until = min(end, (first + sum(1 for _ in alike)) * BLOCK_SIZE)
        if chunk.candidate is not None or until <= chunk.start:
            out.append(part)
            continue
        others: list[Part] = []
        if until < chunk.start + len(chunk.token_ids):
            part, rest = part.split(until - chunk.start)
            others = [rest]
        out += [replace(part, users=(*part.users, work)), *others]
    return out
