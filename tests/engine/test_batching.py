"""The batcher by examples: what is found, who waits for whom, who gives way, who goes first."""

import random
from collections import Counter

import pytest

from moesaic.engine.batching import Batcher, Plan
from moesaic.engine.blocks import BLOCK_SIZE
from moesaic.engine.limits import Limits
from moesaic.engine.requests import Generation, Request, RequestKey
from moesaic.prefix.block_hashes import BlockHasher
from tests.engine.steps import advance, commit

LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_num_queued_reqs=6,
    max_num_queued_tokens=300,
    max_model_len=160,
)
NUM_BLOCKS = 14
HASHER = BlockHasher(b"secret", "model", BLOCK_SIZE)


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
