"""Steps in segments tell what plain ones tell, whatever happens to the experts meanwhile."""

from typing import Any

import pytest

from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.sequences.requests import Event, FinishEvent, GenerationTask, Sampling
from moesaic.engine.shortcuts import SegmentedSteps
from moesaic.models.layers.decode_segments import DecodeSegments
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from tests.engine.rig import prompts, rig


class Counted(SegmentedSteps):
    """Counts the steps that it has taken."""

    taken = 0

    async def forward(self, step: Any, batches: Any) -> Any:
        logits = await super().forward(step, batches)
        self.taken += logits is not None
        return logits


async def told(
    tiny_model: Any,
    made: list[Counted] | None,
    failures: int = 0,
    max_rows: int = 4,
) -> tuple[dict[str, list[Event]], list[tuple[int, int]]]:
    def shortcut(decoder: Decoder, dispatcher: LocalDispatcher, cache: KVCache) -> SegmentedSteps:
        segments = DecodeSegments(decoder, cache, max_rows, max_length=64)
        assert made is not None
        made.append(Counted(segments, dispatcher))
        return made[-1]

    async with rig(tiny_model, shortcut=None if made is None else shortcut) as r:
        r.dispatcher.failures = failures
        for name, tokens in prompts(5).items():
            sampling = Sampling(temperature=0.8, seed=5) if name == "r1" else Sampling()
            task = GenerationTask(max_tokens=12, sampling=sampling, top_logprobs=3)
            r.submit(name, tokens, task)
        await r.ended(*prompts(5))
        by_name = {n: [e for e in r.events if e.key.request_id == n] for n in prompts(5)}
        return by_name, r.dispatcher.asked


@pytest.mark.parametrize("failures", [0, 3])
@pytest.mark.parametrize("max_rows", [1, 4, 8])
async def test_events_are_those_of_plain_steps(
    tiny_model: Any, failures: int, max_rows: int
) -> None:
    made: list[Counted] = []

    events, asked = await told(tiny_model, made, failures, max_rows)

    assert made[0].taken > 0
    assert made[0].layers_done > 0
    assert all(isinstance(each[-1], FinishEvent) for each in events.values())
    plain, asked_plainly = await told(tiny_model, None, failures)
    assert events == plain
    assert asked == asked_plainly  # rows that fill a step up are sent to nobody
