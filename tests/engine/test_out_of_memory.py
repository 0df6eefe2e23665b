"""A step that finds no memory fails its own requests with a typed error, and the engine goes on."""

from typing import Any

import pytest
import torch

from moesaic.engine.sequences.requests import FailureEvent, GenerationTask, ScoringTask
from moesaic.errors import Overloaded
from tests.engine.rig import NUM_LAYERS, rig

STEPS = 3  # one of the prompt, two of answers


@pytest.mark.parametrize("call", range(NUM_LAYERS * STEPS))
async def test_whichever_layer_of_whichever_step_finds_none(tiny_model: Any, call: int) -> None:
    async with rig(tiny_model) as r:
        dispatch, pool = r.dispatcher.dispatch, r.engine.batcher.pool
        calls = 0

        async def fails_once(*step: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call + 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 KiB.")
            return await dispatch(*step)

        r.dispatcher.dispatch = fails_once  # type: ignore[method-assign]  # in place of a class of its own
        r.submit("unlucky", [4, 5, 6], GenerationTask(max_tokens=STEPS))
        await r.ended("unlucky")
        [failure] = [e for e in r.events if isinstance(e, FailureEvent)]

        assert isinstance(failure.error, Overloaded)
        assert "ran out of memory (3072 bytes were refused)" in str(failure.error)
        assert "--max-num-batched-tokens" in str(failure.error)
        assert pool.num_used == 0
        r.submit("next", [4, 5, 6], GenerationTask(max_tokens=STEPS))
        r.submit("score", [4, 5, 6], ScoringTask(((7, 8), (9,))))
        await r.ended("next", "score")
        assert r.tokens("next") == tiny_model.greedy([4, 5, 6], STEPS)
        assert pool.num_used == 0
