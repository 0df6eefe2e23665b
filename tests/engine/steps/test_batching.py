"""The batcher by examples: what is found, who waits for whom, who gives way, who goes first."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey, ScoringTask
from moesaic.engine.steps.admission import EngineLimits
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.queues import PlannedStep
from moesaic.errors import Overloaded
from moesaic.prefix.blocks import BLOCK_SIZE, BlockHasher
from tests.engine.steps.steps import advance, calls_of, commit

LIMITS = EngineLimits(
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
    return Request(RequestKey(name), prompt, GenerationTask(max_tokens=answer), **how)  # type: ignore[arg-type]


def rows_of(plan: PlannedStep) -> dict[str, int]:
    return {chunk.sequence.request.key.request_id: len(chunk.token_ids) for chunk in plan.chunks}


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
    assert [chunk.sequence.num_cached for chunk in plan.chunks] == [32, 48]
    assert batcher.tally.prefix_queries_tokens == 48 + 48 + 50
    assert batcher.tally.prefix_hits_tokens == 32 + 48


def test_what_an_answer_said_is_found_by_the_next_turn() -> None:
    batcher = batcher_of()
    batcher.submit(request("turn", 10, answer=40))
    said: list[int] = []
    while batcher.unfinished():
        [chunk] = batcher.plan().chunks
        said = list(chunk.sequence.tokens)
        commit(batcher, chunk)

    batcher.submit(request("next", [*said, 1, 2, 0]))

    assert batcher.plan().chunks[0].start == 48


def test_other_tenants_find_nothing() -> None:
    batcher = batcher_of()
    batcher.submit(request("first", 48))
    run(batcher)

    batcher.submit(request("again", 48, cache_salt="other"))

    assert batcher.plan().chunks[0].start == 0


@pytest.mark.parametrize(("clean", "found"), [(0, 0), (15, 0), (16, 16), (33, 32), (math.inf, 32)])
def test_nobody_finds_kv_that_was_computed_in_a_degraded_way(clean: float, found: int) -> None:
    batcher = batcher_of()
    batcher.submit(request("first", 48))
    while batcher.unfinished():
        [chunk] = batcher.plan().chunks
        chunk.sequence.account.clean = clean
        commit(batcher, chunk)

    batcher.submit(request("again", 48))

    assert batcher.plan().chunks[0].start == found


def test_nobody_waits_for_blocks_that_will_not_be_published() -> None:
    batcher = batcher_of()
    batcher.submit(request("first", 48))
    batcher.plan()
    batcher.submit(request("waits", 48))
    assert {chunk.sequence.request.key.request_id for chunk in batcher.plan().chunks} == {"first"}

    batcher.running[0].account.clean = 0

    both = {chunk.sequence.request.key.request_id for chunk in batcher.plan().chunks}
    assert "waits" in both


def test_requests_that_begin_alike_compute_the_beginning_once() -> None:
    batcher = batcher_of()
    for name in range(4):
        batcher.submit(request(str(name), [*range(64), 70 + name]))
    batcher.submit(request("other", [100, 101]))

    rows: Counter[str] = Counter()
    while batcher.unfinished():
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


# Fairness: a flood, and who comes while it is computed.


def steps_until_it_ends(batcher: Batcher, name: str, most: int = 100) -> int:
    for step in range(1, most):
        if RequestKey(name) in advance(batcher, batcher.plan()):
            return step
    raise AssertionError(f"{name} did not end within {most} steps")


def flood(batcher: Batcher, count: int, tokens: int, answer: int = 1, **how: int | str) -> Batcher:
    """Work of many, a step of which has been computed."""
    for n in range(count):
        prompt = [ord("f"), *range(n * 100, n * 100 + tokens - 1)]
        batcher.submit(request(f"flood{n}", prompt, answer, **how))
    advance(batcher, batcher.plan())
    return batcher


def wide(num_blocks: int = 200) -> Batcher:
    limits = replace(LIMITS, max_num_queued_reqs=600, max_num_queued_tokens=10**6)
    return Batcher(limits, num_blocks, HASHER)


@pytest.mark.parametrize(
    ("flooding", "asking"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),  # many requests of another tenant
        ({"part_of": "huge"}, {}),  # one request of the same tenant, of many works
        ({"part_of": "huge", "tenant": "a"}, {"tenant": "b", "part_of": "huge"}),
        ({}, {"priority": -1}),
        ({"priority": 1, "tenant": "a"}, {"tenant": "b"}),
    ],
)
def test_beside_a_flood_of_prompts_a_short_request_waits_for_a_step_only(
    flooding: dict[str, str], asking: dict[str, str | int]
) -> None:
    batcher = flood(wide(), 300, 60, **flooding)

    batcher.submit(request("short", [7, 8], answer=4, **asking))

    assert steps_until_it_ends(batcher, "short") <= 6


@pytest.mark.parametrize(
    ("flooding", "asking"),
    [
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"part_of": "huge"}, {}),
        ({}, {"priority": -(2**31)}),
        ({"tenant": "a", "priority": -(2**31)}, {"tenant": "b"}),
    ],
)
def test_beside_a_flood_of_answers_a_short_request_gets_a_place(
    flooding: dict[str, str | int], asking: dict[str, str | int]
) -> None:
    batcher = flood(wide(), 400, 10, answer=100, **flooding)

    batcher.submit(request("short", [7, 8], answer=4, **asking))

    assert steps_until_it_ends(batcher, "short") <= 5
    assert batcher.tally.preemptions == 1


def test_beside_answers_that_hold_all_blocks_a_short_request_gets_its_own() -> None:
    batcher = flood(wide(num_blocks=12), 3, 32, answer=60, tenant="a")
    while batcher.pool.num_free:
        advance(batcher, batcher.plan())

    batcher.submit(request("short", [7, 8], answer=4, tenant="b"))

    assert steps_until_it_ends(batcher, "short") <= 5


def with_a_large_request_that_lacks_blocks() -> Batcher:
    """Two answers of other tenants hold 8 of 14 blocks, and ``large`` waits for 7."""
    batcher = batcher_of(NUM_BLOCKS)
    for name in "ab":
        batcher.submit(request(name, [ord(name)] * 55, answer=60, tenant=name))
    while not all(sequence.decodes for sequence in batcher.unfinished()):
        advance(batcher, batcher.plan())
    batcher.submit(request("large", 96, tenant="c"))
    advance(batcher, batcher.plan())
    assert batcher.lacks_blocks
    assert batcher.pool.num_free == 6
    return batcher


def test_a_short_request_borrows_blocks_that_are_too_few_for_a_large_one() -> None:
    batcher = with_a_large_request_that_lacks_blocks()

    batcher.submit(request("short", [7, 8], answer=4, tenant="d"))

    assert steps_until_it_ends(batcher, "short") == 4


def test_blocks_that_are_lent_come_back_once_the_large_request_can_begin() -> None:
    batcher = with_a_large_request_that_lacks_blocks()
    batcher.submit(request("borrower", [7] * 50, answer=60, tenant="d"))
    assert "borrower" in rows_of(batcher.plan())

    batcher.cancel(RequestKey("a"))

    plan = batcher.plan()
    assert "large" in rows_of(plan)
    assert "borrower" not in rows_of(plan)
    assert "borrower" in run(batcher)


@pytest.mark.parametrize(("flooding", "rows"), [("mine", 255), ("others", 24)])
def test_beside_an_answer_prompts_take_little_time_and_least_beside_another_tenants(
    flooding: str, rows: int
) -> None:
    limits = replace(LIMITS, max_num_seqs=64, max_num_batched_tokens=1024, max_num_queued_reqs=999)
    limits = replace(limits, max_num_queued_tokens=1 << 20)
    batcher = Batcher(limits, 4096, HASHER, step_target_s=0.25)
    for num_rows in (128, 256, 512):
        batcher.pace.took(num_rows, num_rows / 1024)
    batcher.submit(request("answer", [7, 8], answer=50, tenant="mine"))
    advance(batcher, batcher.plan())

    flood(batcher, 300, 60, tenant=flooding)

    assert batcher.plan().prompt_rows == pytest.approx(rows, abs=2)


def test_tenants_that_both_flood_get_the_same_number_of_rows() -> None:
    batcher = wide()
    for n in range(100):
        for tenant, tokens in (("a", 50), ("a", 50), ("b", 20)):
            prompt = [*range(n * 100, n * 100 + tokens - 1), ord(tenant)]
            name = f"{tenant}{n}{tokens}{batcher.num_waiting}"
            batcher.submit(request(name, prompt, tenant=tenant))
    rows: Counter[str] = Counter()
    for _ in range(60):
        plan = batcher.plan()
        for chunk in plan.chunks:
            rows[chunk.sequence.claim.tenant] += len(chunk.token_ids)
        advance(batcher, plan)

    assert abs(rows["a"] - rows["b"]) <= 2 * LIMITS.max_num_batched_tokens


def test_a_tenant_puts_its_work_behind_others_but_not_before_them() -> None:
    batcher = flood(wide(), 100, 60, tenant="a", priority=-(2**31))
    batcher.submit(request("later", [7, 8], tenant="b", priority=1000))
    batcher.submit(request("short", [7, 8], tenant="b"))

    ended = run(batcher, steps=60)

    assert ended.index("short") <= 2
    assert "later" not in ended


def test_a_long_request_goes_on_beside_short_ones() -> None:
    batcher = batcher_of(200)
    batcher.submit(request("long", 150))
    for n in range(40):
        advance(batcher, batcher.plan())
        if batcher.num_waiting < 5:
            for k in range(2):
                batcher.submit(request(f"{n}-{k}", [n + 200, k, *range(300 + n, 325 + n)]))
        if not any(sequence.request.key.request_id == "long" for sequence in batcher.unfinished()):
            break

    assert n <= 12, "it needs five steps and has half of them"


def test_a_full_queue_lets_more_urgent_ones_and_other_tenants_in() -> None:
    batcher = batcher_of()
    for n in range(6):
        batcher.submit(request(f"a{n}", [n], tenant="a"))

    gone = [
        sequence.request.key.request_id
        for sequence in batcher.submit(request("b", [7], tenant="b"))
    ]
    gone += [
        sequence.request.key.request_id
        for sequence in batcher.submit(request("urgent", [8], tenant="a", priority=-1))
    ]

    assert gone == ["a5", "a4"]
    assert batcher.tally.displaced == 2
    with pytest.raises(Overloaded):
        batcher.submit(request("a6", [9], tenant="a"))


def test_with_steps_of_few_rows_a_long_candidate_runs_whole() -> None:
    limits = replace(LIMITS, max_num_batched_tokens=64)
    batcher = Batcher(limits, 64, HASHER, step_target_s=1e-9)
    batcher.pace.took(64, 1.0)
    batcher.submit(Request(RequestKey("score"), (1, 2, 3), ScoringTask(((5,) * 40, (6,)))))

    assert run(batcher, steps=5) == ["score"]


def test_a_step_looks_at_those_that_wait_once_not_once_for_each_that_runs() -> None:
    limits = replace(
        LIMITS,
        max_num_seqs=64,
        max_num_batched_tokens=128,
        max_num_queued_reqs=512,
        max_num_queued_tokens=10**5,
    )
    batcher = Batcher(limits, 1000, HASHER)

    def submit(name: str, number: int) -> None:
        tenant = "one" if number % 2 else "other"
        batcher.submit(request(f"{name}-{number}", [number] * 20, answer=100, tenant=tenant))

    for number in range(64):
        submit("runs", number)
    for _ in range(64):
        advance(batcher, batcher.plan())
    assert all(sequence.decodes for sequence in batcher.running)
    alone = calls_of(batcher.schedule)
    for number in range(512):
        submit("waits", number)

    assert alone < 20 * 64
    assert calls_of(batcher.schedule) < alone + 10 * 512


def test_a_flood_is_refused_without_a_look_at_all_that_wait() -> None:
    limits = replace(LIMITS, max_num_queued_reqs=512, max_num_queued_tokens=10**5)
    batcher = Batcher(limits, 1000, HASHER)
    for number in range(512):
        batcher.submit(request(f"{number}", 20))

    def refused() -> None:
        with pytest.raises(Overloaded, match="512 requests are waiting"):
            batcher.submit(request("late", 20))

    assert calls_of(refused) < 512


def test_a_long_candidate_runs_beside_answers_that_leave_too_few_rows() -> None:
    limits = replace(LIMITS, max_num_seqs=32, max_num_queued_reqs=64)
    batcher = Batcher(limits, 1000, HASHER)
    names = itertools.count()

    def step() -> set[str]:
        while len(batcher.unfinished()) < 31:  # an answer comes for each that ends
            name = next(names)
            batcher.submit(request(f"{name}", 3, answer=30 + name % 20))
        return {key.request_id for key in advance(batcher, batcher.plan())}

    for _ in range(25):
        step()
    candidates = tuple((token,) * 10 for token in range(2))
    batcher.submit(Request(RequestKey("score"), tuple(range(20)), ScoringTask(candidates)))

    assert any("score" in step() for _ in range(300))
