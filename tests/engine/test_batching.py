"""The batcher under any sequence of events, against a model of what is in the KV cache: every request
ends once, blocks are conserved, no row reads what is not there, nothing waits for ever."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moesaic.engine.batching import Batcher, Plan
from moesaic.engine.blocks import BLOCK_SIZE
from moesaic.engine.limits import Limits
from moesaic.engine.requests import Generation, Request, RequestKey, Scoring
from moesaic.engine.sequences import Answer, Chunk, Score, rank
from moesaic.engine.sweeps import Slice
from moesaic.errors import InvalidInput, Overloaded
from moesaic.prefix.block_hashes import BlockHasher

LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_num_queued_reqs=6,
    max_num_queued_tokens=300,
    max_model_len=160,
)
BUSY = replace(LIMITS, max_num_queued_tokens=150, sweep_blocks=18)
NUM_BLOCKS = 14
NUM_LAYERS = 3
HASHER = BlockHasher(b"secret", "model", BLOCK_SIZE)


def commit(batcher: Batcher, chunk: Chunk) -> RequestKey | None:
    """What the engine does with one chunk of a successful step; the request's key if it ended."""
    work = chunk.owner
    if work not in batcher.everything():
        return None
    batcher.commit(chunk)
    if isinstance(work, Answer):
        if chunk.wanted:
            work.tokens.append(len(work.tokens) % 3)
        ended = work.num_generated == work.work.max_tokens
    else:
        if chunk.candidate is None and chunk.wanted:
            work.pending = [i for i, c in enumerate(work.work.candidates) if len(c) > 1]
            work.logprobs = [0.0] * len(work.work.candidates)
        ended = bool(work.logprobs) and not work.pending
    if ended:
        batcher.finish(work)
    return work.request.key if ended else None


def advance(batcher: Batcher, work: Plan | Slice) -> list[RequestKey]:
    """A successful step; the requests that ended."""
    chunks = work.chunks
    if isinstance(work, Slice):
        chunks = list(work.sweep.chunks) if batcher.sweeps.advance(work) else []
    keys = [commit(batcher, chunk) for chunk in chunks]
    return [key for key in keys if key is not None]


class AnyHistory(RuleBasedStateMachine):
    """Submissions, cancellations, deadlines, steps and failed steps in any order.

    The model is ``cache``: for every place of every block, the whole text up to the token whose KV
    was last written there, since KV depends on all of it, with the root it was computed for. Of the
    area of sweeps, ``kept`` has the same with the layer whose KV it is, and ``passed`` with the
    layer that the row has passed.
    """

    hasher: BlockHasher | None = HASHER

    def __init__(self) -> None:
        super().__init__()
        self.batcher = Batcher(BUSY, NUM_BLOCKS, self.hasher, NUM_LAYERS)
        self.open: set[RequestKey] = set()
        self.ended: Counter[RequestKey] = Counter()
        self.now_s = 0.0
        self.cache: dict[tuple[int, int], tuple[bytes, tuple[int, ...]] | None] = {}
        self.kept: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        self.passed: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}

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
            "exact": st.sampled_from([False, False, True]),
            "deadline_s": st.sampled_from([None, None, 5.0, 20.0]),
        }
    )

    def _submit(
        self, work: Generation | Scoring, prompt: list[int], how: dict[str, object]
    ) -> None:
        key = RequestKey(str(len(self.ended)))
        self.ended[key] = 0
        queue = self.batcher.num_waiting
        tokens = self.batcher.waiting.num_tokens + self.batcher.sweeps.waiting.num_tokens
        too_long = queue > 0 and tokens + len(prompt) > BUSY.max_num_queued_tokens
        try:
            self.batcher.submit(Request(key, tuple(prompt), work, **how))  # type: ignore[arg-type]
        except InvalidInput:
            self.ended[key] += 1
        except Overloaded:
            self.ended[key] += 1
            assert queue >= BUSY.max_num_queued_reqs or too_long
        else:
            assert queue < BUSY.max_num_queued_reqs
            assert not too_long
            self.open.add(key)

    def _end(self, keys: list[RequestKey]) -> None:
        for key in keys:
            assert key in self.open
            self.open.discard(key)
            self.ended[key] += 1

    @rule(prompt=prompt, how=how, answer=st.integers(1, 60))
    def generate(self, prompt: list[int], how: dict[str, object], answer: int) -> None:
        self._submit(Generation(max_tokens=answer), prompt, how)

    @rule(
        prompt=prompt,
        how=how,
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
        store_kv=st.booleans(),
    )
    def score(
        self, prompt: list[int], how: dict[str, object], lengths: list[int], store_kv: bool
    ) -> None:
        self._submit(Scoring(tuple((1,) * n for n in lengths), store_kv), prompt, how)

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
        for work in self.batcher.expired(self.now_s):
            self.batcher.finish(work)
            self._end([work.request.key])
        assert not self.batcher.expired(self.now_s)

    @rule()
    def step(self) -> None:
        work = self._checked_step()
        self._write(work, succeeds=True)
        self._end(advance(self.batcher, work))

    @rule()
    def failed_step(self) -> None:
        self._write(self._checked_step(), succeeds=False)

    @rule(data=st.data())
    def step_during_which_requests_are_cancelled(self, data: st.DataObject) -> None:
        work = self._checked_step()
        self._write(work, succeeds=True)
        for key in sorted(self.open):
            if data.draw(st.booleans()):
                self.batcher.cancel(key)
                self._end([key])
        self._end(advance(self.batcher, work))

    def _checked_step(self) -> Plan | Slice:
        work = self.batcher.next_step()
        assert sum(len(c.token_ids) for c in work.chunks) <= BUSY.max_num_batched_tokens
        assert len(self.batcher.running) <= BUSY.max_num_seqs
        if self.batcher.everything():
            assert work.chunks or isinstance(work, Slice), "there is work, and nothing of it runs"
        return work

    def _write(self, work: Plan | Slice, *, succeeds: bool) -> None:
        """Run the step on the model; a failed one leaves rubbish where it wrote."""
        if isinstance(work, Slice):
            self._write_slice(work, succeeds=succeeds)
        else:
            self._write_plan(work, succeeds=succeeds)

    def _write_slice(self, piece: Slice, *, succeeds: bool) -> None:
        texts = []
        for chunk in piece.chunks:
            tokens = chunk.owner.request.token_ids
            full = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
            candidate = chunk.candidate
            behind = () if candidate is None else chunk.owner.work.candidates[candidate][:-1]  # type: ignore[union-attr]
            text = (*tokens, *behind)
            texts.append(text)
            assert chunk.start >= (0 if candidate is None else full)
            assert tuple(chunk.token_ids) == text[chunk.start :][: len(chunk.token_ids)]
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                place = (chunk.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                if piece.layer:
                    assert self.passed[place] == (piece.layer - 1, text[: position + 1])
                self.kept[place] = (piece.layer, text[: position + 1])
        for chunk, text in zip(piece.chunks, texts, strict=True):
            for position in range(chunk.start + len(chunk.token_ids)):
                place = (chunk.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                assert self.kept[place] == (piece.layer, text[: position + 1])
                if succeeds and position >= chunk.start:
                    self.passed[place] = (piece.layer, text[: position + 1])

    def _write_plan(self, plan: Plan, *, succeeds: bool) -> None:
        for source, target in plan.copies:
            for offset in range(BLOCK_SIZE):
                self.cache[target, offset] = self.cache.get((source, offset))
        written: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}
        for chunk in plan.chunks:
            assert 0 < len(chunk.token_ids) >= chunk.wanted, "logits are wanted of no row"
            text = [*chunk.owner.tokens[: chunk.start], *chunk.token_ids]
            asked = chunk.owner.request
            root = HASHER.root(asked.cache_salt, exact=asked.exact)
            for position in range(len(text)):
                place = (chunk.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                content = (root, tuple(text[: position + 1]))
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
        for work in self.batcher.everything():
            mine = swept if isinstance(work, Score) and work.swept else holders
            mine.update(work.blocks)
            if isinstance(work, Score):
                mine.update(block for lane in work.lanes for block in lane)
        assert set(swept.values()) <= {1}
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
            assert queue.num_tokens == sum(len(work.tokens) for work in waiting)
            assert all(not work.blocks for work in waiting)

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.batcher.everything():
                break
            self.step()
        assert not self.batcher.everything()
        assert not self.open
        assert set(self.ended.values()) <= {1}, "a request ended twice or never"
        assert self.batcher.pool.num_used == self.batcher.sweeps.area.num_used == 0


class AnyHistoryWithoutCache(AnyHistory):
    """The same with nothing shared."""

    hasher = None


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyHistoryWithoutCache = AnyHistoryWithoutCache.TestCase
TestAnyHistoryWithoutCache.settings = settings(
    max_examples=20, stateful_step_count=40, deadline=None
)


def batcher_of(num_blocks: int = 64) -> Batcher:
    return Batcher(LIMITS, num_blocks, HASHER)


def request(name: str, tokens: int | list[int], answer: int = 1, **how: int | str) -> Request:
    prompt = tuple(range(tokens)) if isinstance(tokens, int) else tuple(tokens)
    return Request(RequestKey(name), prompt, Generation(max_tokens=answer), **how)  # type: ignore[arg-type]


def rows_of(plan: Plan) -> dict[str, int]:
    return {chunk.owner.request.key.request_id: len(chunk.token_ids) for chunk in plan.chunks}


def run(batcher: Batcher, steps: int = 500) -> list[str]:
    """Names of the requests that ended, in order."""
    return [key.request_id for _ in range(steps) for key in advance(batcher, batcher.plan())]


def test_a_prompt_that_was_computed_before_costs_its_last_block_only() -> None:
    batcher = batcher_of()
    batcher.submit(request("first", 48))
    run(batcher)

    batcher.submit(request("again", 48))
    batcher.submit(request("longer", 50))
    plan = batcher.plan()

    assert rows_of(plan) == {"again": 16, "longer": 2}
    assert [chunk.owner.num_cached for chunk in plan.chunks] == [32, 48]
    assert batcher.tally.prefix_queries_tokens == 48 + 48 + 50
    assert batcher.tally.prefix_hits_tokens == 32 + 48


def test_what_an_answer_said_is_found_by_the_next_turn() -> None:
    batcher = batcher_of()
    batcher.submit(request("turn", 10, answer=40))
    said: list[int] = []
    while batcher.everything():
        [chunk] = batcher.plan().chunks
        said = list(chunk.owner.tokens)
        commit(batcher, chunk)

    batcher.submit(request("next", [*said, 1, 2, 0]))

    assert batcher.plan().chunks[0].start == 48


@pytest.mark.parametrize("how", [{"cache_salt": "other"}, {"exact": True}])
def test_other_tenants_and_better_qualities_find_nothing(how: dict[str, int | str]) -> None:
    batcher = batcher_of()
    batcher.submit(request("first", 48))
    run(batcher)

    batcher.submit(request("again", 48, **how))

    assert batcher.plan().chunks[0].start == 0


def test_requests_that_begin_alike_compute_the_beginning_once() -> None:
    batcher = batcher_of()
    for name in range(4):
        batcher.submit(request(str(name), [*range(64), 70 + name]))
    batcher.submit(request("other", [100, 101]))

    rows: Counter[str] = Counter()
    while batcher.everything():
        plan = batcher.plan()
        rows.update(rows_of(plan))
        advance(batcher, plan)

    assert rows == {"0": 65, "1": 1, "2": 1, "3": 1, "other": 2}


def test_who_waits_for_anothers_blocks_goes_on_when_that_one_is_cancelled() -> None:
    batcher = batcher_of()
    for name in ("first", "second"):
        batcher.submit(request(name, 100))
    advance(batcher, batcher.plan())
    assert rows_of(batcher.plan()) == {"first": 32}
    batcher.cancel(RequestKey("first"))

    plan = batcher.plan()

    assert rows_of(plan) == {"second": 32}
    assert plan.chunks[0].start == 32


def test_running_answers_keep_their_pace_while_a_long_prompt_is_prefilled() -> None:
    batcher = batcher_of()
    batcher.submit(request("decoding", 1, answer=50))
    advance(batcher, batcher.plan())
    batcher.submit(request("long", 100))

    rows = []
    for _ in range(4):
        plan = batcher.plan()
        rows.append(rows_of(plan))
        advance(batcher, plan)

    assert [r["decoding"] for r in rows] == [1, 1, 1, 1]
    assert [r["long"] for r in rows] == [31, 31, 31, 7]


def test_the_youngest_answer_gives_way_and_still_gets_all_its_tokens() -> None:
    batcher = batcher_of(NUM_BLOCKS)
    for name, first in (("old", 0), ("young", 1)):
        batcher.submit(request(name, [first] * 90, answer=60))

    assert run(batcher) == ["old", "young"]
    assert batcher.tally.preemptions > 0


def test_the_least_urgent_answer_gives_way_though_it_came_first() -> None:
    batcher = batcher_of(NUM_BLOCKS)
    batcher.submit(request("can wait", [0] * 90, answer=60, priority=1))
    batcher.submit(request("urgent", [1] * 90, answer=60, priority=0))

    assert run(batcher) == ["urgent", "can wait"]


def test_urgent_requests_overtake_waiting_ones() -> None:
    batcher = batcher_of()
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -5), ("e", 0)):
        batcher.submit(request(name, [ord(name)] * 30, priority=priority))

    assert run(batcher) == ["d", "a", "c", "e", "b"]


def test_order_of_submission_is_order_of_service() -> None:
    batcher = batcher_of()
    order = [str(n) for n in range(6)]
    rng = random.Random(0)
    for name in order:
        batcher.submit(request(name, [int(name)] * rng.randint(1, 20)))

    assert run(batcher, steps=20) == order
