"""The sequences of an engine: generations that grow token by token, and prompts whose candidates are scored.

Both turn into chunks, runs of consecutive positions of one block table. State moves on only after a
step has succeeded; a step that failed is planned again from the same state and overwrites the same
KV.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moesaic.engine.sequences.blocks import BlockPool, blocks_for
from moesaic.engine.sequences.grammar import Matcher
from moesaic.engine.sequences.requests import Degradation, GenerationTask, Request, ScoringTask
from moesaic.fairness import Claim
from moesaic.prefix.blocks import BLOCK_SIZE

if TYPE_CHECKING:  # this room's core stays free of torch
    from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows of one sequence in one step: positions ``start .. start + len(token_ids) - 1``."""

    sequence: "GenerationSequence | ScoringSequence"
    token_ids: list[int]
    start: int
    block_table: list[int]
    wanted: int  # the last ``wanted`` rows are read: their logits, or as ``pools`` says
    candidate: int | None = None  # index of the candidate that is scored; None: rows of the prompt

    @property
    def pools(self) -> bool:
        """True if outputs of the final norm are wanted instead of logits."""
        return isinstance(self.sequence, ScoringSequence) and self.sequence.task.pooling is not None

    def split(self, count: int) -> tuple["Chunk", "Chunk"]:
        """Cut it into its first ``count`` rows and the others; both together want what it wants."""
        rows, others = self.token_ids[:count], self.token_ids[count:]
        wanted = min(self.wanted, len(others))
        first = replace(self, token_ids=rows, wanted=self.wanted - wanted)
        return first, replace(self, token_ids=others, start=self.start + count, wanted=wanted)


@dataclass
class QualityAccount:
    """Promises to the rows of a sequence so far, and the outcome.

    Attributes:
        rows: that were computed, those computed again included.
        thresholds: the sum of what they were promised.
        choices: of experts, in all layers that rows passed.
        degraded: of them, those that their own experts did not serve.
        clean: tokens from the beginning whose KV was computed without any such.
    """

    rows: float = 0
    thresholds: float = 0.0
    choices: int = 0
    degraded: int = 0
    clean: float = math.inf

    def add(self, rows: float, threshold: float, choices: int, degraded: int = 0) -> None:
        """Count rows that were promised ``threshold``."""
        self.rows += rows
        self.thresholds += rows * threshold
        self.choices += choices
        self.degraded += degraded

    @property
    def is_exact(self) -> bool:
        """True if nothing was degraded, or could have been."""
        return not self.degraded and self.thresholds >= self.rows

    @property
    def degradation(self) -> Degradation:
        """The account, as callers are told it."""
        if self.is_exact:
            return Degradation(rows=round(self.rows))
        share = self.degraded / max(1, self.choices)
        mean = self.thresholds / self.rows if self.rows else 1.0
        return Degradation(mean, min(1.0, share), round(self.rows))


@dataclass(eq=False)
class LogitState:
    """State that changes of one sequence's logits keep from step to step, on the device of the logits.

    Attributes:
        bias_ids: tokens whose logits get a bias.
        bias: of each of them.
        allowed_ids: the only tokens that may be picked; empty: any may be.
        end_ids: the end tokens.
        matcher: the answer's place in its grammar.
        ids: tokens of prompt and answer, each once.
        counts: how often the answer has each of them.
    """

    bias_ids: "Tensor"
    bias: "Tensor"
    allowed_ids: "Tensor"
    end_ids: "Tensor"
    matcher: Matcher | None
    ids: "array[int]" = field(default_factory=lambda: array("q"))
    counts: "array[float]" = field(default_factory=lambda: array("f"))
    _place: dict[int, int] = field(default_factory=dict)
    _num_counted: int = 0

    def count(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Count the tokens that came since the last call; the first ``num_prompt`` are the prompt's."""
        for position in range(self._num_counted, len(tokens)):
            token = tokens[position]
            place = self._place.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0.0)
            self.counts[place] += position >= num_prompt
        self._num_counted = len(tokens)


@dataclass(eq=False, kw_only=True)
class _Sequence:
    """The state that both kinds have. The KV of the first ``computed`` tokens is in ``blocks``, and
    others can find the first ``num_published`` of these."""

    request: Request
    claim: Claim
    root: bytes = b""  # that the names of its blocks are chained to
    hashes: list[bytes] = field(default_factory=list)  # names of full blocks; none without a cache
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    num_published: int = 0
    num_cached: int | None = None  # tokens whose KV was there already when it first ran
    awaited: bytes | None = None  # the last block that a running sequence will publish for it
    # It runs on blocks that are kept for this one, and gives them back once this one can begin.
    lender: "AnySequence | None" = field(default=None, repr=False)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    account: "QualityAccount" = field(default_factory=lambda: QualityAccount())
    stalled_since_s: float | None = None

    def begin(self, cached: list[int]) -> None:
        """Start behind the KV of these blocks, which it holds already."""
        self.blocks, self.num_published = cached, len(cached)
        self.computed = len(cached) * BLOCK_SIZE

    @property
    def arrival(self) -> int:
        """A number that grows with every request."""
        return self.claim.arrival

    @property
    def unpublished(self) -> list[bytes]:
        """Names of the blocks that it has not published yet, and may publish."""
        return self.hashes[self.num_published :] if self.account.clean == math.inf else []

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back; tokens whose KV is not found later are computed again."""
        pool.give_back(self.blocks)
        self.blocks, self.computed, self.num_published = [], 0, 0
        self.account.clean = math.inf


@dataclass(eq=False, kw_only=True)
class GenerationSequence(_Sequence):
    """A generation under way; ``tokens`` are those of the prompt, then those generated."""

    least_rows = 0  # see ``ScoringSequence``

    task: GenerationTask
    tokens: list[int]
    # Tokens of the prompt whose log-probability was told; the first has none.
    num_described: int = 1
    logit_state: LogitState | None = None  # made when the first token is picked
    last_step: int = 0  # the last one that planned a token for it

    @property
    def num_generated(self) -> int:
        """Number of tokens generated here so far."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def least_blocks(self) -> int:
        """Number of blocks that it needs to begin, those it starts with included."""
        return blocks_for(len(self.tokens) + 1)

    @property
    def held_blocks(self) -> list[int]:
        """All its blocks."""
        return self.blocks

    @property
    def rows_left(self) -> int:
        """Number of rows to compute before its next token."""
        return len(self.tokens) - self.computed

    @property
    def decodes(self) -> bool:
        """True if its last token is all it has to compute."""
        return self.computed == len(self.tokens) - 1 >= len(self.request.token_ids)

    def chunk(self, budget: int) -> Chunk:
        """Return the next rows, at most ``budget``; ``blocks`` must reach that far."""
        rows = self.tokens[self.computed : self.computed + budget]
        reaches_end = self.computed + len(rows) == len(self.tokens)
        wanted = len(rows) if self.describes_prompt else int(reaches_end)
        return Chunk(self, rows, self.computed, self.blocks, wanted)

    @property
    def answer_tokens(self) -> list[int]:
        """Tokens generated here and by earlier attempts."""
        return self.tokens[len(self.request.token_ids) - self.task.num_resumed :]

    @property
    def describes_prompt(self) -> bool:
        """True if logits of all the prompt's rows are still wanted."""
        wanted = self.task.prompt_logprobs is not None
        return wanted and self.num_described < len(self.request.token_ids)


@dataclass(eq=False, kw_only=True)
class ScoringSequence(_Sequence):
    """A prompt and its candidates, scored.

    It takes all blocks it will ever need at once, so it never waits half-way for more; if it has to
    give them up for others, it begins again. Candidates of one token are read off the prompt's last
    row. Longer ones run as siblings behind the prompt's full blocks; each has a copy of the partly
    filled last block, since siblings write different tokens into it.
    """

    task: ScoringTask
    swept: bool = False  # stores no KV: its blocks are those of a sweep's area
    lanes: list[list[int]] = field(default_factory=list)  # blocks of siblings that run in one step
    logprobs: list[float] = field(default_factory=list)
    pooled: "Tensor | None" = None  # float32 [H]: the sum of the rows to pool so far
    pending: list[int] = field(default_factory=list)  # longer candidates not computed yet, by index

    decodes = False  # see ``GenerationSequence``

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the prompt; others never find candidates."""
        return self.request.token_ids

    @property
    def longest_pending(self) -> int:
        """Number of rows of the longest candidate that is not computed yet."""
        return max((len(self.task.candidates[i]) - 1 for i in self.pending), default=0)

    @property
    def least_rows(self) -> int:
        """Number of rows that a step must have for it, since a candidate runs whole."""
        return self.longest_pending if self.computed == len(self.tokens) else 0

    @property
    def held_blocks(self) -> list[int]:
        """All its blocks."""
        return [*self.blocks, *(block for lane in self.lanes for block in lane)]

    @property
    def rows_left(self) -> int:
        """Number of rows to compute."""
        candidates = self.task.candidates
        open_ones = self.pending if self.logprobs else range(len(candidates))
        return len(self.tokens) - self.computed + sum(len(candidates[i]) - 1 for i in open_ones)

    def take_blocks(self, pool: BlockPool, most_lanes: int) -> bool:
        """Take the rest of the prompt's blocks, and as many lanes as useful and possible.

        Returns:
            False if not even one lane fits; then nothing was taken.
        """
        siblings = sum(len(c) > 1 for c in self.task.candidates)
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
        """Number of blocks that it needs to begin, those it starts with included."""
        lane = self._lane_blocks if any(len(c) > 1 for c in self.task.candidates) else 0
        return blocks_for(len(self.tokens)) + lane

    @property
    def _lane_blocks(self) -> int:
        longest = max(len(c) for c in self.task.candidates)
        return blocks_for(len(self.tokens) + longest - 1) - len(self.tokens) // BLOCK_SIZE

    def chunks(self, budget: int) -> list[Chunk]:
        """Return the next rows, at most ``budget`` in all."""
        if self.computed < len(self.tokens):
            rows = list(self.tokens[self.computed : self.computed + budget])
            reaches_end = self.computed + len(rows) == len(self.tokens)
            wanted = len(rows) if self.task.pooling == "mean" else int(reaches_end)
            return [Chunk(self, rows, self.computed, self.blocks, wanted)]
        full = self.blocks[: len(self.tokens) // BLOCK_SIZE]
        out = []
        for candidate, lane in zip(self.pending, self.lanes, strict=False):
            rows = list(self.task.candidates[candidate][:-1])
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
        """List the KV blocks to copy, (from, to), before these chunks run."""
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
        self.lanes, self.pooled = [], None
        super().release(pool)


AnySequence = GenerationSequence | ScoringSequence


def rank(sequence: AnySequence) -> tuple[int, int]:
    """Return the key that sequences are ordered by; less goes first."""
    return sequence.request.priority, sequence.arrival


def reusable(sequence: AnySequence) -> list[bytes]:
    """List the names of the blocks that ``sequence`` may take over from others.

    Tokens whose rows are wanted must run, and the last one's always is.
    """
    if isinstance(sequence, GenerationSequence):
        wants_all = sequence.describes_prompt
    else:
        wants_all = sequence.task.pooling == "mean"
    if wants_all:
        return []
    return sequence.hashes[: (len(sequence.tokens) - 1) // BLOCK_SIZE]


def sequence_of(request: Request, arrival: int, *, swept: bool) -> AnySequence:
    """Make the sequence of a fresh request; ``swept``: it stores no KV."""
    part_of = request.part_of or request.key.request_id
    # Ids are unique within a stream.
    whole = f"{request.key.stream}/{part_of}"
    claim = Claim(request.tenant, whole, request.priority, arrival)
    if isinstance(request.task, GenerationTask):
        tokens = list(request.token_ids)
        return GenerationSequence(request=request, claim=claim, task=request.task, tokens=tokens)
    return ScoringSequence(request=request, claim=claim, task=request.task, swept=swept)


def count_epoch(spans: list[tuple[int, int]], epoch: int, tokens: int) -> None:
    """Add ``tokens`` computed under ``epoch`` to ``spans``, in place."""
    if spans and spans[-1][0] == epoch:
        spans[-1] = (epoch, spans[-1][1] + tokens)
    else:
        spans.append((epoch, tokens))
