"""Running work: answers that grow token by token, and prompts whose candidate continuations are
scored.

Both turn into ``Chunk`` s, runs of consecutive positions of one block table. State moves on only in
``advance``, after a step has succeeded; a step that failed is planned again from the same state and
overwrites the same KV.
"""

from dataclasses import dataclass, field

from moesaic.engine.blocks import BLOCK_SIZE, BlockPool, blocks_for
from moesaic.engine.requests import Generation, Request, Scoring


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


@dataclass(eq=False)
class Answer:
    """A generation. ``tokens`` is the prompt and what was generated; the first ``computed`` have
    their KV."""

    request: Request
    work: Generation
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)
    stalled_since_s: float | None = None

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.token_ids)

    def chunk(self, budget: int) -> Chunk:
        """The next rows, at most ``budget``; the caller has made sure that ``blocks`` reach that
        far."""
        rows = self.tokens[self.computed : self.computed + budget]
        reaches_end = self.computed + len(rows) == len(self.tokens)
        return Chunk(self, rows, self.computed, self.blocks, wanted=int(reaches_end))

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back; the KV has to be computed again."""
        pool.give_back(self.blocks)
        self.blocks, self.computed = [], 0


@dataclass(eq=False)
class Score:
    """A prompt and its candidates. All blocks it will ever need are taken at once, so it never
    waits half-way.

    Candidates of one token are read off the prompt's last row. Longer ones run as siblings behind
    the prompt's full blocks; the partly filled last block is copied for each, since siblings write
    different tokens into it.
    """

    request: Request
    work: Scoring
    computed: int = 0
    blocks: list[int] = field(default_factory=list)  # of the prompt
    lanes: list[list[int]] = field(
        default_factory=list
    )  # blocks of siblings that can run in one step
    logprobs: list[float] = field(default_factory=list)
    pending: list[int] = field(
        default_factory=list
    )  # candidates of several tokens that are not computed yet
    epochs: list[tuple[int, int]] = field(default_factory=list)
    stalled_since_s: float | None = None

    @property
    def _prompt(self) -> tuple[int, ...]:
        return self.request.token_ids

    def take_blocks(self, pool: BlockPool, most_lanes: int) -> bool:
        """Take the prompt's blocks and as many lanes as useful and possible; false if not even one
        fits."""
        longest = max(len(c) for c in self.work.candidates)
        siblings = sum(len(c) > 1 for c in self.work.candidates)
        prompt_blocks = blocks_for(len(self._prompt))
        lane = blocks_for(len(self._prompt) + longest - 1) - len(self._prompt) // BLOCK_SIZE
        room = pool.num_free - prompt_blocks
        lanes = min(siblings, most_lanes, room // lane if lane else 0) if siblings else 0
        if room < 0 or (siblings and lanes < 1):
            return False
        self.blocks = pool.take(prompt_blocks)
        self.lanes = [pool.take(lane) for _ in range(lanes)]
        return True

    def chunks(self, budget: int) -> list[Chunk]:
        """The next rows, at most ``budget`` in all."""
        if self.computed < len(self._prompt):
            rows = list(self._prompt[self.computed : self.computed + budget])
            reaches_end = self.computed + len(rows) == len(self._prompt)
            return [Chunk(self, rows, self.computed, self.blocks, wanted=int(reaches_end))]
        full = self.blocks[: len(self._prompt) // BLOCK_SIZE]
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
                    len(self._prompt),
                    [*full, *lane],
                    wanted=len(rows),
                    candidate=candidate,
                )
            )
        return out

    def copies(self, chunks: list[Chunk]) -> list[tuple[int, int]]:
        """KV blocks to copy, (from, to), before these chunks run."""
        tail = len(self._prompt) % BLOCK_SIZE
        full = len(self._prompt) // BLOCK_SIZE
        return [
            (self.blocks[full], c.block_table[full])
            for c in chunks
            if c.candidate is not None and tail
        ]

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back."""
        pool.give_back(self.blocks)
        for lane in self.lanes:
            pool.give_back(lane)
        self.blocks, self.lanes, self.computed = [], [], 0


Work = Answer | Score


def work_of(request: Request) -> Work:
    """The state a fresh request starts from."""
    if isinstance(request.work, Generation):
        return Answer(request, request.work, list(request.token_ids))
    return Score(request, request.work)


def count_epoch(spans: list[tuple[int, int]], epoch: int, tokens: int) -> None:
    """Add ``tokens`` computed under ``epoch`` to the spans, in place."""
    if spans and spans[-1][0] == epoch:
        spans[-1] = (epoch, spans[-1][1] + tokens)
    else:
        spans.append((epoch, tokens))
