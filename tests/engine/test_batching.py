"""The batcher under any sequence of events: blocks are conserved, every request ends, nothing waits
for ever."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moesaic.engine.batching import Batcher, Limits, Plan
from moesaic.engine.blocks import BLOCK_SIZE, BlockPool, OutOfBlocks
from moesaic.engine.requests import Generation, Request, RequestKey, Scoring
from moesaic.engine.sequences import Answer, Score
from moesaic.errors import InvalidInput, Overloaded

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=32, max_num_queued_reqs=6, max_model_len=160)
NUM_BLOCKS = 14


def advance(batcher: Batcher, plan: Plan) -> list[RequestKey]:
    """What a successful step does to the state; returns the requests that ended."""
    ended = []
    for chunk in plan.chunks:
        work = chunk.owner
        if work not in batcher.everything():
            continue
        if isinstance(work, Answer):
            work.computed += len(chunk.token_ids)
            if chunk.wanted:
                work.tokens.append(7)
            if work.num_generated == work.work.max_tokens:
                batcher.finish(work)
                ended.append(work.request.key)
        elif chunk.candidate is None:
            work.computed += len(chunk.token_ids)
            if chunk.wanted:
                work.pending = [i for i, c in enumerate(work.work.candidates) if len(c) > 1]
                work.logprobs = [0.0] * len(work.work.candidates)
        else:
            work.pending.remove(chunk.candidate)
        if isinstance(work, Score) and work.logprobs and not work.pending:
            batcher.finish(work)
            ended.append(work.request.key)
    return ended


class AnyHistory(RuleBasedStateMachine):
    """Submissions, cancellations and steps in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher = Batcher(LIMITS, NUM_BLOCKS)
        self.open: set[RequestKey] = set()
        self.count = 0

    def _submit(self, work: Generation | Scoring, prompt: int) -> None:
        self.count += 1
        request = Request(RequestKey(str(self.count)), tuple(range(prompt)), work)
        try:
            self.batcher.submit(request)
        except (InvalidInput, Overloaded):
            return
        self.open.add(request.key)

    @rule(prompt=st.integers(1, 100), answer=st.integers(1, 60))
    def generate(self, prompt: int, answer: int) -> None:
        self._submit(Generation(max_tokens=answer), prompt)

    @rule(prompt=st.integers(1, 100), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8))
    def score(self, prompt: int, lengths: list[int]) -> None:
        self._submit(Scoring(tuple(tuple(range(n)) for n in lengths)), prompt)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.open)))
        assert self.batcher.cancel(key)
        self.open.discard(key)

    @rule()
    def step(self) -> None:
        self.open -= set(advance(self.batcher, self._checked_plan()))

    @rule()
    def failed_step(self) -> None:
        self._checked_plan()

    def _checked_plan(self) -> Plan:
        plan = self.batcher.plan()
        assert sum(len(c.token_ids) for c in plan.chunks) <= LIMITS.max_num_batched_tokens
        assert len(self.batcher.running) <= LIMITS.max_num_seqs
        written: dict[tuple[int, int], object] = {}
        for chunk in plan.chunks:
            for position in range(chunk.start, chunk.start + len(chunk.token_ids)):
                place = (chunk.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE)
                assert place not in written, "two rows write one place of the KV cache"
                written[place] = chunk
        if self.batcher.everything():
            assert plan.chunks, "there is work, and nothing of it runs"
        return plan

    @invariant()
    def blocks_are_conserved(self) -> None:
        pool = self.batcher.pool
        held: list[int] = []
        for work in self.batcher.everything():
            held += work.blocks
            if isinstance(work, Score):
                held += [block for lane in work.lanes for block in lane]
        assert len(held) == len(set(held)) == pool.num_used
        assert pool.num_free + pool.num_used == NUM_BLOCKS

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.batcher.everything():
                break
            self.open -= set(advance(self.batcher, self._checked_plan()))
        assert not self.batcher.everything()
        assert not self.open
        assert self.batcher.pool.num_used == 0


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_running_answers_keep_their_pace_while_a_long_prompt_is_prefilled() -> None:
    batcher = Batcher(LIMITS, 64)
    batcher.submit(Request(RequestKey("decoding"), (1,), Generation(max_tokens=50)))
    advance(batcher, batcher.plan())
    batcher.submit(Request(RequestKey("long"), tuple(range(100)), Generation(max_tokens=1)))

    rows = []
    for _ in range(4):
        plan = batcher.plan()
        rows.append({c.owner.request.key.request_id: len(c.token_ids) for c in plan.chunks})
        advance(batcher, plan)

    assert [r["decoding"] for r in rows] == [1, 1, 1, 1]
    assert [r["long"] for r in rows] == [31, 31, 31, 7]


def test_the_youngest_answer_gives_way_and_still_gets_all_its_tokens() -> None:
    batcher = Batcher(LIMITS, NUM_BLOCKS)
    for name in ("old", "young"):
        batcher.submit(Request(RequestKey(name), tuple(range(90)), Generation(max_tokens=60)))

    ended = []
    for _ in range(500):
        ended += advance(batcher, batcher.plan())

    assert [key.request_id for key in ended] == ["old", "young"]
    assert batcher.num_preemptions > 0


@pytest.mark.parametrize(
    ("work", "field"),
    [
        (Generation(max_tokens=0), "max_tokens"),
        (Generation(max_tokens=200), "prompt"),
        (Scoring(()), "labels"),
        (Scoring(((1,), ())), "labels"),
        (Scoring((tuple(range(40)),)), "labels"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_field(
    work: Generation | Scoring, field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        Batcher(LIMITS, NUM_BLOCKS).submit(Request(RequestKey("x"), (1, 2, 3), work))

    assert refused.value.field == field


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    batcher = Batcher(LIMITS, NUM_BLOCKS)
    for number in range(LIMITS.max_num_queued_reqs):
        batcher.submit(Request(RequestKey(str(number)), (1,), Generation(max_tokens=1)))

    with pytest.raises(Overloaded) as refused:
        batcher.submit(Request(RequestKey("one too many"), (1,), Generation(max_tokens=1)))

    assert refused.value.retry_after_s > 0


def test_blocks_are_given_out_once_and_taken_back_once() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)

    with pytest.raises(OutOfBlocks):
        pool.take(2)
    assert pool.num_free == 1
    pool.give_back(blocks)

    assert pool.num_free == 2
    with pytest.raises(KeyError):
        pool.give_back(blocks)


def test_order_of_submission_is_order_of_service() -> None:
    batcher = Batcher(LIMITS, 64)
    order = [str(n) for n in range(6)]
    rng = random.Random(0)
    for name in order:
        tokens = tuple(range(rng.randint(1, 20)))
        batcher.submit(Request(RequestKey(name), tokens, Generation(max_tokens=1)))

    ended = []
    for _ in range(20):
        ended += [key.request_id for key in advance(batcher, batcher.plan())]

    assert ended == order
