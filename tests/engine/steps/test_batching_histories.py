"""The batcher under any sequence of events, against a model of what is in the KV cache: every request
ends once, blocks are conserved, no row reads what is not there, nothing waits for ever."""

import math
from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey, ScoringTask
from moesaic.engine.sequences.sequence import AnySequence, Chunk, ScoringSequence, rank
from moesaic.engine.steps.admission import EngineLimits
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice
from moesaic.errors import InvalidInput, Overloaded
from moesaic.fairness import who_gives_way
from moesaic.prefix.blocks import BLOCK_SIZE, BlockHasher
from moesaic.prefix.flops import AttentionFlops, ModelFlops
from tests.engine.steps.steps import advance

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_num_queued_reqs=6,
    max_num_queued_tokens=300,
    max_model_len=160,
)
BUSY = replace(LIMITS, max_num_queued_tokens=150, sweep_blocks=18)
NUM_BLOCKS = 14
NUM_LAYERS = 3
TENANTS = ["", "x", "y"]  # of all but newcomers
MOST_TURNS = 2 * len(TENANTS) + 1  # that a newcomer waits for; see ``newcomer``
PROMPT_ROWS = 16  # that a step has at least for the prompts that are first in turn
HASHER = BlockHasher(b"secret", "model", BLOCK_SIZE)
FLOPS = ModelFlops([AttentionFlops(3, 1)] * NUM_LAYERS, 20, head=7)
Content = tuple[bytes, tuple[int, ...]]  # whose text, and the text up to a token


def text_of(chunk: Chunk) -> tuple[int, ...]:
    """The whole sequence that a sweep's chunk is of."""
    owner, candidate = chunk.sequence, chunk.candidate
    assert isinstance(owner, ScoringSequence)
    behind = () if candidate is None else owner.task.candidates[candidate][:-1]
    return (*owner.request.token_ids, *behind)


def root_of(request: Request) -> bytes:
    return HASHER.root(request.cache_salt)


def steps_alone(sequence: AnySequence) -> int:
    """The steps that a sequence needs at most, if each computes some of it."""
    steps = math.ceil((len(sequence.tokens) - sequence.computed) / PROMPT_ROWS)
    if isinstance(sequence, ScoringSequence):
        return steps + len(sequence.task.candidates)
    return steps + sequence.task.max_tokens - sequence.num_generated


def place_of(chunk: Chunk, position: int) -> tuple[int, int]:
    return chunk.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE


class AnyHistory(RuleBasedStateMachine):
    """Submissions, cancellations, deadlines, steps and failed steps in any order.

    The model is ``cache``: for every place of every block, the whole text up to the token whose KV
    was last written there, since KV depends on all of it, with the root it was computed for. Of the
    area of sweeps, ``kept`` has the same with the layer whose KV it is, and ``passed`` with the
    layer that the row has passed.
    """

    hasher: BlockHasher | None = HASHER
    step_target_s = 0.0

    def __init__(self) -> None:
        super().__init__()
        target_s = self.step_target_s
        self.batcher = Batcher(BUSY, NUM_BLOCKS, self.hasher, NUM_LAYERS, FLOPS, target_s)
        self.open: set[RequestKey] = set()
        self.ended: Counter[RequestKey] = Counter()
        self.now_s = 0.0
        self.cache: dict[tuple[int, int], Content | None] = {}
        self.kept: dict[tuple[int, int], tuple[int, Content]] = {}
        self.passed: dict[tuple[int, int], tuple[int, Content]] = {}

    prompt = st.builds(
        # few distinct beginnings, so that prompts share them
        lambda common, length, rest: [*([common] * length), *rest],
        st.integers(0, 1),
        st.sampled_from([0, 15, 16, 17, 32, 40, 64]),
        st.just([]) | st.lists(st.integers(0, 2), max_size=36),
    )
    how = st.fixed_dictionaries(
        {
            "priority": st.integers(-1, 1),
            "cache_salt": st.sampled_from(["", "", "a"]),
            "min_threshold": st.sampled_from([0.0, 0.0, 1.0]),
            "deadline_s": st.sampled_from([None, None, 5.0, 20.0]),
            "tenant": st.sampled_from(["", *TENANTS]),
            "part_of": st.sampled_from(["", "one", "two"]),
        }
    )

    def _submit(
        self, task: GenerationTask | ScoringTask, prompt: list[int], how: dict[str, object]
    ) -> None:
        key = RequestKey(str(len(self.ended)))
        self.ended[key] = 0
        queue = self.batcher.num_waiting
        tokens = self.batcher.waiting.num_tokens + self.batcher.sweeps.waiting.num_tokens
        too_long = queue > 0 and tokens + len(prompt) > BUSY.max_num_queued_tokens
        request = Request(key, tuple(prompt), task, **how)  # type: ignore[arg-type]
        try:
            displaced = self.batcher.submit(request)
        except InvalidInput:
            self.ended[key] += 1
        except Overloaded:
            self.ended[key] += 1
            assert queue >= BUSY.max_num_queued_reqs or too_long
        else:
            assert displaced or queue < BUSY.max_num_queued_reqs
            assert displaced or not too_long
            assert self.batcher.num_waiting <= BUSY.max_num_queued_reqs
            for work_ in displaced:
                theirs = work_.request
                assert theirs.tenant != request.tenant or theirs.priority > request.priority
                assert work_.num_cached is None, "it had begun"
            self._end([work_.request.key for work_ in displaced])
            self.open.add(key)

    def _end(self, keys: list[RequestKey]) -> None:
        for key in keys:
            assert key in self.open
            self.open.discard(key)
            self.ended[key] += 1

    @rule(prompt=prompt, how=how, answer=st.integers(1, 60))
    def generate(self, prompt: list[int], how: dict[str, object], answer: int) -> None:
        self._submit(GenerationTask(max_tokens=answer), prompt, how)

    @rule(
        prompt=prompt,
        how=how,
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
        store_kv=st.booleans(),
    )
    def score(
        self, prompt: list[int], how: dict[str, object], lengths: list[int], store_kv: bool
    ) -> None:
        self._submit(ScoringTask(tuple((1,) * n for n in lengths), store_kv), prompt, how)

    @rule(
        shared=st.sampled_from([16, 32, 48]),
        own=st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=20), min_size=2, max_size=3),
    )
    def score_siblings(self, shared: int, own: list[list[int]]) -> None:
        """Swept together, if there is room; none of them is found by the others' prompts."""
        for rest in own:
            prompt = [2] * shared + rest
            self._submit(ScoringTask(((1,), (1, 2, 1)), store_kv=False), prompt, {})

    @rule(tokens=st.integers(1, 16))
    def newcomer(self, tokens: int) -> None:
        """A short request of a tenant that has nothing ends soon, whatever else there is.

        Light steps aside, which are half of all at most, its steps are of two kinds.

        In some it could have its blocks: they are free, or others have to give way. Of these there
        are ``MOST_TURNS`` at most. It starts level with the tenant that has had least. A step that
        does not reach it gives rows to a tenant before it, which stands behind it from then on: so
        there is one such step for each tenant at most. Then it gets a row or more. Tenants that
        lacked blocks until now may stand before it once more, again for one step each: they get 16
        rows or more, and it had less. Then it is first, and gets its last rows.

        In the others too few blocks are free, and no tenant has any beside its oldest work. Each
        of these steps computes some of that work: a token of an answer, a candidate, or 16 rows of
        a prompt. So they are no more than the work of the others takes.
        """
        key, tenant = RequestKey(str(len(self.ended))), f"new{len(self.ended)}"
        if self.batcher.num_waiting >= BUSY.max_num_queued_reqs:
            return
        most_lacking = sum(map(steps_alone, self.batcher.unfinished()))
        request = Request(
            key, (9,) * tokens, GenerationTask(max_tokens=1), tenant=tenant, priority=-1
        )
        self.ended[key] = 0
        try:
            displaced = self.batcher.submit(request)
        except Overloaded:
            self.ended[key] += 1
            return
        self._end([sequence.request.key for sequence in displaced])
        self.open.add(key)
        newcomer = next(s for s in self.batcher.unfinished() if s.request.key == key)
        turns = lacking = 0
        while key in self.open:
            lacks_blocks = self._lacks_blocks(newcomer)
            planned = self._checked_step()
            self._write(planned, succeeds=True)
            if isinstance(planned, Slice):
                self._check_end(planned)
            else:
                self.batcher.took(planned, 1.0)
                lacks_blocks |= self._lacks_blocks(newcomer)
                if lacks_blocks and newcomer not in planned.sequences:
                    lacking += not planned.is_light
                else:
                    turns += not planned.is_light
            self._end(advance(self.batcher, planned))
            assert turns <= MOST_TURNS, "a short request of a tenant that has nothing waits long"
            assert lacking <= most_lacking, "it waits for blocks longer than others have work"

    def _lacks_blocks(self, newcomer: AnySequence) -> bool:
        """True if it does not run, and neither free blocks nor those of others are its to take."""
        pool, running = self.batcher.pool, self.batcher.running

        def held(sequence: AnySequence) -> int:
            return pool.num_alone(sequence.held_blocks)

        needs, free = newcomer.least_blocks, pool.num_free
        if newcomer in running:
            return False
        return who_gives_way(newcomer.claim, needs, free, running, held) is None

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        assert self.batcher.cancel(key)
        assert not self.batcher.cancel(key)
        self._end([key])

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for sequence in self.batcher.expired(self.now_s):
            self.batcher.finish(sequence)
            self._end([sequence.request.key])
        assert not self.batcher.expired(self.now_s)

    @rule(took_s=st.sampled_from([0.0, 0.1, 50.0]))
    def step(self, took_s: float = 0.0) -> None:
        planned = self._checked_step()
        self._write(planned, succeeds=True)
        if isinstance(planned, Slice):
            self._check_end(planned)
        else:
            self.batcher.took(planned, took_s)
        self._end(advance(self.batcher, planned, took_s))

    @rule()
    def failed_step(self) -> None:
        self._write(self._checked_step(), succeeds=False)

    @rule(data=st.data())
    def step_during_which_requests_are_cancelled(self, data: st.DataObject) -> None:
        planned = self._checked_step()
        self._write(planned, succeeds=True)
        for key in sorted(self.open):
            if data.draw(st.booleans()):
                self.batcher.cancel(key)
                self._end([key])
        if isinstance(planned, Slice):
            self._check_end(planned)
        self._end(advance(self.batcher, planned))

    def _checked_step(self) -> PlannedStep | Slice:
        planned = self.batcher.schedule()
        assert sum(len(c.token_ids) for c in planned.chunks) <= BUSY.max_num_batched_tokens
        assert len(self.batcher.running) <= BUSY.max_num_seqs
        if self.batcher.unfinished():
            assert planned.chunks or isinstance(planned, Slice), (
                "there is work, and nothing of it runs"
            )
        return planned

    def _write(self, planned: PlannedStep | Slice, *, succeeds: bool) -> None:
        """Run the step on the model; a failed one leaves rubbish where it wrote."""
        if isinstance(planned, Slice):
            self._write_slice(planned, succeeds=succeeds)
        else:
            self._write_plan(planned, succeeds=succeeds)

    def _write_slice(self, piece: Slice, *, succeeds: bool) -> None:
        assert piece.num_rows >= min(16, sum(len(p.chunk.token_ids) for p in piece.left))
        rows = [(chunk, text_of(chunk), root_of(chunk.sequence.request)) for chunk in piece.chunks]
        for chunk, text, root in rows:
            assert tuple(chunk.token_ids) == text[chunk.start :][: len(chunk.token_ids)]
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                place, content = place_of(chunk, position), (root, text[: position + 1])
                if piece.layer:
                    assert self.passed[place] == (piece.layer - 1, content)
                self.kept[place] = (piece.layer, content)
        for chunk, text, root in rows:
            for position in range(chunk.start + len(chunk.token_ids)):
                place, content = place_of(chunk, position), (root, text[: position + 1])
                assert self.kept[place] == (piece.layer, content)
                if succeeds and position >= chunk.start:
                    self.passed[place] = (piece.layer, content)

    def _check_end(self, piece: Slice) -> None:
        """All rows whose logits are about to be read have passed all layers."""
        if piece.left or piece.layer < NUM_LAYERS - 1:
            return
        for chunk in piece.sweep.wanted:
            if chunk.sequence in piece.sweep.sequences:
                text, root = text_of(chunk), root_of(chunk.sequence.request)
                for position in range(len(text)):
                    content = (root, text[: position + 1])
                    assert self.passed[place_of(chunk, position)] == (piece.layer, content)

    def _write_plan(self, plan: PlannedStep, *, succeeds: bool) -> None:
        for source, target in plan.copies:
            for offset in range(BLOCK_SIZE):
                self.cache[target, offset] = self.cache.get((source, offset))
        written: dict[tuple[int, int], Content] = {}
        for chunk in plan.chunks:
            assert 0 < len(chunk.token_ids) >= chunk.wanted, "logits are wanted of no row"
            text = [*chunk.sequence.tokens[: chunk.start], *chunk.token_ids]
            root = root_of(chunk.sequence.request)
            for position in range(len(text)):
                place, content = place_of(chunk, position), (root, tuple(text[: position + 1]))
                if position < chunk.start:
                    assert place not in written, "a row reads what the same step overwrites"
                    assert self.cache[place] == content, "a row reads the KV of another text"
                else:
                    assert place not in written, "two rows write one place"
                    assert place[0] not in self.batcher.pool.published, "a shared block is written"
                    written[place] = content
        self.cache.update(written if succeeds else dict.fromkeys(written))

    @invariant()
    def blocks_are_conserved(self) -> None:
        pool, sweeps = self.batcher.pool, self.batcher.sweeps
        holders: Counter[int] = Counter()
        swept: Counter[int] = Counter()
        for sequence in self.batcher.unfinished():
            mine = swept if isinstance(sequence, ScoringSequence) and sequence.swept else holders
            mine.update(sequence.blocks)
            if isinstance(sequence, ScoringSequence):
                mine.update(block for lane in sequence.lanes for block in lane)
        assert self.hasher or set(swept.values()) <= {1}
        assert len(swept) == sweeps.area.num_used
        assert len(holders) == pool.num_used
        assert pool.num_free + pool.num_used == NUM_BLOCKS
        assert pool.num_cached <= pool.num_free
        assert all(block in pool.published for block, count in holders.items() if count > 1)

    @invariant()
    def published_blocks_hold_what_their_names_say(self) -> None:
        published = self.batcher.pool.published
        assert len(set(published.values())) == len(published)
        for block, name in published.items():
            content = self.cache[block, BLOCK_SIZE - 1]
            assert content is not None
            root, text = content
            names: list[bytes] = []
            HASHER.extend(names, root, text)
            assert names[-1] == name

    @invariant()
    def the_queue_is_in_order_and_counts_its_tokens(self) -> None:
        for queue in (self.batcher.waiting, self.batcher.sweeps.waiting):
            waiting = list(queue)
            assert waiting == sorted(waiting, key=rank)
            assert queue.num_tokens == sum(len(sequence.tokens) for sequence in waiting)
            assert all(not sequence.blocks for sequence in waiting)

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.batcher.unfinished():
                break
            self.step()
        assert not self.batcher.unfinished()
        assert not self.open
        assert set(self.ended.values()) <= {1}, "a request ended twice or never"
        assert self.batcher.pool.num_used == self.batcher.sweeps.area.num_used == 0


class AnyHistoryWithoutCache(AnyHistory):
    """The same with nothing shared."""

    hasher = None


class AnyHistoryWithLightSteps(AnyHistory):
    """The same where light tenants have steps of their own."""

    step_target_s = 1.0


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyHistoryWithoutCache = AnyHistoryWithoutCache.TestCase
TestAnyHistoryWithoutCache.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None
)

TestAnyHistoryWithLightSteps = AnyHistoryWithLightSteps.TestCase
TestAnyHistoryWithLightSteps.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
