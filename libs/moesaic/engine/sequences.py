"""Running work: answers that grow token by token, and prompts whose candidate continuations are
scored.

Both turn into ``Chunk`` s, runs of consecutive positions of one block table. State moves on only
after a step has succeeded; a step that failed is planned again from the same state and overwrites
the same KV.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moesaic.engine.blocks import BLOCK_SIZE, BlockPool, blocks_for
from moesaic.engine.requests import Generation, Request, Scoring
from moesaic.fairness import Claim

if TYPE_CHECKING:  # this room's core stays free of torch
    from moesaic.engine.processors import LogitState


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence in one step: positions ``start .. start + len(token_ids) - 1``."""

    owner: "Answer | Score"
    token_ids: list[int]
    start: int
    block_table: list[int]
    wanted: int  # logits are wanted of the last ``wanted`` rows
    candidate: int | None = (
        None  # scoring: which candidate these rows belong to; None is the prompt
    )


@dataclass(eq=False, kw_only=True)
class _Sequence:
    """What running work has in common: the KV of its first ``computed`` tokens is in ``blocks``,
    and the first ``num_published`` of these can be found by others."""

    request: Request
    claim: Claim
    root: bytes = b""  # what the names of its blocks are chained to
    hashes: list[bytes] = field(default_factory=list)  # names of full blocks; none without a cache
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    num_published: int = 0
    num_cached: int | None = None  # tokens whose KV was there already when it first ran
    awaited: bytes | None = None  # the last block that it shares with running work
    epochs: list[tuple[int, int]] = field(default_factory=list)
    stalled_since_s: float | None = None

    def begin(self, cached: list[int]) -> None:
        """Start behind the KV of these blocks, which are held already."""
        self.blocks, self.num_published = cached, len(cached)
        self.computed = len(cached) * BLOCK_SIZE

    @property
    def arrival(self) -> int:
        """Counts up with every request that comes."""
        return self.claim.arrival

    @property
    def unpublished(self) -> list[bytes]:
        """Names of the blocks that nobody can find yet through it."""
        return self.hashes[self.num_published :]

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back; what cannot be found again has to be computed again."""
        pool.give_back(self.blocks)
        self.blocks, self.computed, self.num_published = [], 0, 0


@dataclass(eq=False, kw_only=True)
class Answer(_Sequence):
    """A generation. ``tokens`` is the prompt and what was generated."""

    least_rows = 0  # see ``Score``

    work: Generation
    tokens: list[int]
    num_described: int = (
        1  # tokens of the prompt whose log-probability was told; the first has none
    )
    logit_state: "LogitState | None" = None  # made when the first token is picked
    last_step: int = 0  # in which it was planned to get a token

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def least_blocks(self) -> int:
        """Blocks that it needs to begin, those it starts with included."""
        return blocks_for(len(self.tokens) + 1)

    @property
    def held_blocks(self) -> list[int]:
        """All its blocks."""
        return self.blocks

    @property
    def rows_left(self) -> int:
        """Rows that are yet to be computed before its next token."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its last token is all it has to compute."""
        return self.num_generated > 0 and self.computed == len(self.tokens) - 1

    def chunk(self, budget: int) -> Chunk:
        """The next rows, at most ``budget``; the caller has made sure that ``blocks`` reach that
        far."""
        rows = self.tokens[self.computed : self.computed + budget]
        reaches_end = self.computed + len(rows) == len(self.tokens)
        wanted = len(rows) if self.describes_prompt else int(reaches_end)
        return Chunk(self, rows, self.computed, self.blocks, wanted)

    @property
    def answer(self) -> list[int]:
        """What was generated, here and by earlier attempts."""
        return self.tokens[len(self.request.token_ids) - self.work.num_resumed :]

    @property
    def describes_prompt(self) -> bool:
        """Whether logits of all the prompt's rows are still wanted."""
        wanted = self.work.prompt_logprobs is not None
        return wanted and self.num_described < len(self.request.token_ids)


@dataclass(eq=False, kw_only=True)
class Score(_Sequence):
    """A prompt and its candidates. All blocks it will ever need are taken at once, so it never
    waits half-way for more; if it has to give them up for others, it begins again.

    Candidates of one token are read off the prompt's last row. Longer ones run as siblings behind
    the prompt's full blocks; the partly filled last block is copied for each, since siblings write
    different tokens into it.
    """

    work: Scoring
    swept: bool = False  # stores no KV: its blocks are those of a sweep's area
    lanes: list[list[int]] = field(
        default_factory=list
    )  # blocks of siblings that can run in one step
    logprobs: list[float] = field(default_factory=list)
    pending: list[int] = field(
        default_factory=list
    )  # candidates of several tokens that are not computed yet

    decodes = False  # see ``Answer``

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt; candidates are never found by others."""
        return self.request.token_ids

    @property
    def longest_pending(self) -> int:
        """Rows of the longest candidate that is yet to be computed."""
        return max((len(self.work.candidates[i]) - 1 for i in self.pending), default=0)

    @property
    def least_rows(self) -> int:
        """Rows that a step must have for it, since a candidate runs whole."""
        return self.longest_pending if self.computed == len(self.tokens) else 0

    @property
    def held_blocks(self) -> list[int]:
        """All its blocks."""
        return [*self.blocks, *(block for lane in self.lanes for block in lane)]

    @property
    def rows_left(self) -> int:
        """Rows that are yet to be computed."""
        candidates = self.work.candidates
        open_ones = self.pending if self.logprobs else range(len(candidates))
        return len(self.tokens) - self.computed + sum(len(candidates[i]) - 1 for i in open_ones)

    def take_blocks(self, pool: BlockPool, most_lanes: int) -> bool:
        """Take the rest of the prompt's blocks and as many lanes as useful and possible; false if
        not even one fits."""
        siblings = sum(len(c) > 1 for c in self.work.candidates)
        missing = blocks_for(len(self.tokens)) - len(self.blocks)
        room = pool.num_free - missing
        lanes = min(siblings, most_lanes, room // self._lane_blocks) if siblings else 0
        if room < 0 or (siblings and lanes < 1):
            return False
        self.blocks.extend(pool.take(missing))
        self.lanes = [pool.take(self._lane_blocks) for _ in range(lanes)]
        return True

    @property
    def least_blocks(self) -> int:
        """Blocks that it needs to begin, those it starts with included."""
        lane = self._lane_blocks if any(len(c) > 1 for c in self.work.candidates) else 0
        return blocks_for(len(self.tokens)) + lane

    @property
    def _lane_blocks(self) -> int:
        longest = max(len(c) for c in self.work.candidates)
        return blocks_for(len(self.tokens) + longest - 1) - len(self.tokens) // BLOCK_SIZE

    def chunks(self, budget: int) -> list[Chunk]:
        """The next rows, at most ``budget`` in all."""
        if self.computed < len(self.tokens):
            rows = list(self.tokens[self.computed : self.computed + budget])
            reaches_end = self.computed + len(rows) == len(self.tokens)
            return [Chunk(self, rows, self.computed, self.blocks, wanted=int(reaches_end))]
        full = self.blocks[: len(self.tokens) // BLOCK_SIZE]
        out = []
        for candidate, lane in zip(self.pending, self.lanes, strict=False):
            rows = list(self.work.candidates[candidate][:-1])
            if len(rows) > budget:
                break
            budget -= len(rows)
            out.append(
                Chunk(
                    self,
                    rows,
                    len(self.tokens),
                    [*full, *lane],
                    wanted=len(rows),
                    candidate=candidate,
                )
            )
        return out

    def copies(self, chunks: list[Chunk]) -> list[tuple[int, int]]:
        """KV blocks to copy, (from, to), before these chunks run."""
        tail = len(self.tokens) % BLOCK_SIZE
        full = len(self.tokens) // BLOCK_SIZE
        return [
            (self.blocks[full], c.block_table[full])
            for c in chunks
            if c.candidate is not None and tail
        ]

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back."""
        for lane in self.lanes:
            pool.give_back(lane)
        self.lanes = []
        super().release(pool)


Work = Answer | Score


def rank(work: Work) -> tuple[int, int]:
    """What orders work; less goes first."""
    return work.request.priority, work.arrival


def reusable(work: Work) -> list[bytes]:
    """Names of the blocks that ``work`` may take over: tokens whose logits are wanted must run, and
    the last one's always are."""
    if isinstance(work, Answer) and work.describes_prompt:
        return []
    return work.hashes[: (len(work.tokens) - 1) // BLOCK_SIZE]


def work_of(request: Request, arrival: int, *, swept: bool) -> Work:
    """The state a fresh request starts from; ``swept``: it stores no KV."""
    part_of = request.part_of or request.key.request_id
    whole = f"{request.key.stream}/{part_of}"  # ids are unique within a stream
    claim = Claim(request.tenant, whole, request.priority, arrival)
    if isinstance(request.work, Generation):
        tokens = list(request.token_ids)
        return Answer(request=request, claim=claim, work=request.work, tokens=tokens)
    return Score(request=request, claim=claim, work=request.work, swept=swept)


def count_epoch(spans: list[tuple[int, int]], epoch: int, tokens: int) -> None:
    """Add ``tokens`` computed under ``epoch`` to the spans, in place."""
    if spans and spans[-1][0] == epoch:
        spans[-1] = (epoch, spans[-1][1] + tokens)
    else:
        spans.append((epoch, tokens))
