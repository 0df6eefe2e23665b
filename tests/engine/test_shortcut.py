"""Steps that are computed in fewer calls tell what others tell, and are left out where somebody watches."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.tracing import ChosenExperts, StepTracer
from moesaic.engine.sequences.requests import Event, GenerationTask, Sampling, ScoringTask
from moesaic.engine.shortcuts import Shortcut
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.whole_steps import WholeSteps
from tests.engine.rig import Halves, Rig, prompts, rig

Makes = Callable[[Decoder, LocalDispatcher, KVCache], Shortcut]


class Picky:
    """Whole steps, of up to so many rows."""

    def __init__(self, whole: WholeSteps | None, most_rows: int) -> None:
        assert whole is not None
        self._whole, self._most_rows = whole, most_rows
        self.num_taken = 0

    @property
    def layers_done(self) -> int:
        return self._whole.layers_done

    def num_parts(self, num_rows: int) -> int:
        return 1

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        if len(batches) > 1 or len(batches[0].token_ids) > self._most_rows:
            return None
        self.num_taken += 1
        return self._whole.forward(batches[0])


def making(most_rows: int, made: list[Picky]) -> Makes:
    def make(decoder: Decoder, dispatcher: LocalDispatcher, cache: KVCache) -> Picky:
        made.append(Picky(decoder.whole_steps(cache, dispatcher.kernels), most_rows))
        return made[-1]

    return make


def submit_all(r: Rig) -> None:
    for name, tokens in prompts(6).items():
        sampling = Sampling(temperature=0.8, seed=5) if name == "r1" else Sampling()
        r.submit(name, tokens, GenerationTask(max_tokens=9, sampling=sampling, top_logprobs=3))
    r.submit("p", prompts(6)["r2"], GenerationTask(max_tokens=3, prompt_logprobs=2))
    r.submit("s", prompts(6)["r3"], ScoringTask(candidates=((5, 6, 7), (9,))))


async def told(tiny_model: Any, shortcut: Makes | None) -> dict[str, list[Event]]:
    async with rig(tiny_model, shortcut=shortcut) as r:
        submit_all(r)
        names = [*prompts(6), "p", "s"]
        await r.ended(*names)
        return {n: [e for e in r.events if e.key.request_id == n] for n in names}


@pytest.mark.parametrize("most_rows", [1, 6, 1000])
async def test_events_are_the_same_whichever_steps_are_taken(
    tiny_model: Any, most_rows: int
) -> None:
    made: list[Picky] = []

    events = await told(tiny_model, making(most_rows, made))

    assert made[0].num_taken > 0
    assert events == await told(tiny_model, None)


async def test_the_dispatcher_is_asked_nothing_but_while_a_trace_is_recorded(
    tiny_model: Any,
) -> None:
    made: list[Picky] = []
    async with rig(tiny_model, shortcut=making(1000, made)) as r:
        r.submit("a", [5, 6, 7], GenerationTask(max_tokens=4))
        await r.ended("a")
        assert r.dispatcher.asked == []
        taken = made[0].num_taken

        traced: list[ChosenExperts] = []
        r.engine.trace(StepTracer(r.dispatcher.begin_step().experts.gates, traced.append))
        r.submit("b", [5, 6, 7], GenerationTask(max_tokens=4))
        await r.ended("b")

        assert made[0].num_taken == taken
        assert len(traced) == 4
        assert r.dispatcher.asked
        assert torch.equal(*(torch.tensor(r.tokens(name)) for name in "ab"))


async def test_events_are_the_same_where_steps_are_in_parts(tiny_model: Any) -> None:
    made: list[Halves] = []

    def halves(*parts: Any) -> Halves:
        made.append(Halves(*parts))
        return made[-1]

    assert await told(tiny_model, halves) == await told(tiny_model, None)
    assert made[0].num_cut > 0
