"""What an engine does with a batcher's steps, without computing anything."""

import sys
from collections.abc import Callable

from moesaic.engine.batching import Batcher, Plan
from moesaic.engine.limits import Limits
from moesaic.engine.requests import RequestKey
from moesaic.engine.sequences import Answer, Chunk
from moesaic.engine.sweeps import Slice

MANY_PLACES = Limits(
    max_num_seqs=128,
    max_num_batched_tokens=1024,
    max_num_queued_reqs=999,
    max_num_queued_tokens=10**6,
    max_model_len=4096,
)


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


def advance(batcher: Batcher, work: Plan | Slice, took_s: float = 0.0) -> list[RequestKey]:
    """A successful step; the requests that ended."""
    chunks = work.chunks
    if isinstance(work, Slice):
        chunks = work.sweep.wanted if batcher.sweeps.advance(work, took_s) else []
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
