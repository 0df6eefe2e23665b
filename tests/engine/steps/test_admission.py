"""What an engine refuses: requests that can never run, and more than it may hold."""

from dataclasses import replace

import pytest

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey, ScoringTask
from moesaic.engine.steps.admission import EngineLimits
from moesaic.engine.steps.batching import Batcher
from moesaic.errors import InvalidInput, Overloaded
from tests.engine.steps.steps import advance

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_num_queued_reqs=6,
    max_num_queued_tokens=300,
    max_model_len=160,
)
NUM_BLOCKS = 14


def request(name: str, prompt: int) -> Request:
    return Request(RequestKey(name), tuple(range(prompt)), GenerationTask(max_tokens=1))


@pytest.mark.parametrize(
    ("task", "field"),
    [
        (GenerationTask(max_tokens=0), "max_tokens"),
        (GenerationTask(max_tokens=200), "prompt"),
        (ScoringTask(()), "labels"),
        (ScoringTask(((1,), ())), "labels"),
        (ScoringTask((tuple(range(40)),)), "labels"),
    ],
)
def test_a_request_that_can_never_run_is_refused_by_field(
    task: GenerationTask | ScoringTask, field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        Batcher(LIMITS, NUM_BLOCKS).submit(Request(RequestKey("x"), (1, 2, 3), task))

    assert refused.value.field == field


@pytest.mark.parametrize("longest", [1, 2, 3, 18])
@pytest.mark.parametrize("prompt", [15, 16, 17, 30, 33])
def test_scoring_is_refused_only_where_blocks_are_too_few_for_its_longest_candidate(
    prompt: int, longest: int
) -> None:
    task = ScoringTask(((5,), (6,) * longest, (7, 8)))
    num_blocks, batcher = 0, None
    while batcher is None:
        num_blocks += 1
        batcher = Batcher(LIMITS, num_blocks)
        try:
            batcher.submit(Request(RequestKey("x"), (3,) * prompt, task))
        except InvalidInput:
            batcher = None

    most_used = 0
    while batcher.unfinished():
        planned = batcher.schedule()
        assert planned.chunks  # it does not wait for blocks that never come
        most_used = max(most_used, batcher.pool.num_used)
        advance(batcher, planned)
    assert most_used == num_blocks


@pytest.mark.parametrize(("count", "tokens"), [(LIMITS.max_num_queued_reqs, 1), (3, 100)])
def test_a_full_queue_refuses_and_says_when_to_come_back(count: int, tokens: int) -> None:
    batcher = Batcher(LIMITS, NUM_BLOCKS)
    for number in range(count):
        batcher.submit(request(str(number), tokens))

    with pytest.raises(Overloaded) as refused:
        batcher.submit(request("one too many", tokens))

    assert refused.value.retry_after_s > 0


def test_an_empty_queue_takes_a_prompt_longer_than_it_may_hold() -> None:
    batcher = Batcher(replace(LIMITS, max_num_queued_tokens=10), NUM_BLOCKS)
    batcher.submit(request("long", 100))

    with pytest.raises(Overloaded):
        batcher.submit(request("short", 1))
