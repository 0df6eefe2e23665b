"""What an engine has yet to compute, by stream."""

from dataclasses import replace
from typing import Any

from moesaic.engine.load import Outstanding, outstanding_of
from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey, ScoringTask
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.queues import PlannedStep
from moesaic.prefix.flops import AttentionFlops, ModelFlops
from tests.engine.rig import LIMITS
from tests.engine.steps.steps import advance

FLOPS = ModelFlops([AttentionFlops(3, 2), AttentionFlops(5, 1, window=6)], 10, head=11)


def submit(batcher: Batcher, stream: int, tokens: int, task: GenerationTask | ScoringTask) -> None:
    key = RequestKey(f"{stream}-{tokens}", stream=stream)
    batcher.submit(Request(key, (3,) * tokens, task))


def look(batcher: Batcher) -> dict[int, Outstanding]:
    return outstanding_of(batcher.unfinished(), FLOPS)


def test_each_stream_s_work_is_what_its_requests_have_yet_to_compute() -> None:
    batcher = Batcher(replace(LIMITS, max_num_batched_tokens=24), 64)
    assert look(batcher) == {}
    submit(batcher, 1, 40, GenerationTask(max_tokens=3))
    submit(batcher, 2, 30, ScoringTask(((5,), (6, 7, 8), (4, 4))))
    submit(batcher, 2, 20, ScoringTask(((5,),), store_kv=False))

    siblings = FLOPS.continuation(30, 3)
    assert look(batcher) == {
        1: Outstanding(1, 40, FLOPS.span(0, 40) + 11),
        2: Outstanding(2, 53, FLOPS.span(0, 30) + 11 + siblings + FLOPS.span(0, 20) + 11),
    }


def test_it_becomes_less_with_every_step_and_nothing_at_the_end() -> None:
    batcher = Batcher(replace(LIMITS, max_num_batched_tokens=24), 64)
    submit(batcher, 1, 40, GenerationTask(max_tokens=3))
    submit(batcher, 2, 30, ScoringTask(((5,), (6, 7, 8))))

    seen: list[Any] = []
    while batcher.unfinished():
        seen.append(sum(theirs.flops for theirs in look(batcher).values()))
        plan = batcher.schedule()
        assert isinstance(plan, PlannedStep)
        advance(batcher, plan)

    assert seen[0] == max(seen)
    assert min(seen) >= FLOPS.head
    assert look(batcher) == {}


def test_an_answer_counts_its_next_token() -> None:
    batcher = Batcher(LIMITS, 64)
    submit(batcher, 1, 10, GenerationTask(max_tokens=5))
    for told in (10, 1, 1):
        assert look(batcher)[1].num_tokens == told
        plan = batcher.schedule()
        assert isinstance(plan, PlannedStep)
        advance(batcher, plan)
