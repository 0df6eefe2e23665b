"""What an engine does with a batcher's steps, without computing anything."""

import sys
from collections.abc import Callable

from moesaic.engine.sequences.requests import RequestKey
from moesaic.engine.sequences.sequence import Chunk, GenerationSequence
from moesaic.engine.steps.admission import EngineLimits
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice

MANY_PLACES = EngineLimits(
    max_num_seqs=128,
    max_num_batched_tokens=1024,
    max_num_queued_reqs=999,
    max_num_queued_tokens=10**6,
    max_model_len=4096,
)


def commit(batcher: Batcher, chunk: Chunk) -> RequestKey | None:
    """What the engine does with one chunk of a successful step; the request's key if it ended."""
    sequence = chunk.sequence
    if sequence not in batcher.unfinished():
        return None
    batcher.commit(chunk)
    if isinstance(sequence, GenerationSequence):
        if chunk.wanted:
            sequence.tokens.append(len(sequence.tokens) % 3)
        ended = sequence.num_generated == sequence.task.max_tokens
    else:
        if chunk.candidate is None and chunk.wanted:
            sequence.pending = [i for i, c in enumerate(sequence.task.candidates) if len(c) > 1]
            sequence.logprobs = [0.0] * len(sequence.task.candidates)
        ended = bool(sequence.logprobs) and not sequence.pending
    if ended:
        batcher.finish(sequence)
    return sequence.request.key if ended else None


def advance(
    batcher: Batcher, planned: PlannedStep | Slice, took_s: float = 0.0
) -> list[RequestKey]:
    """A successful step; the requests that ended."""
    chunks = planned.chunks
    if isinstance(planned, Slice):
        chunks = planned.sweep.wanted if batcher.sweeps.advance(planned, took_s) else []
    keys = [commit(batcher, chunk) for chunk in chunks]
    return [key for key in keys if key is not None]


def calls_of(work: Callable[[], object]) -> int:
    """Calls of Python functions that ``work`` takes."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num_calls
