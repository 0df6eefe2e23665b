"""An engine on a tiny model, whose experts can be taken away."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.local import LocalDispatcher, LocalStep
from moesaic.dispatch.substitution import LoadedSubstitution
from moesaic.engine.engine import Engine
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    Request,
    RequestKey,
    ScoreEvent,
    ScoringTask,
    TokenEvent,
)
from moesaic.engine.shortcuts import Shortcut
from moesaic.engine.steps.admission import EngineLimits
from moesaic.errors import ExpertUnavailable, NotReady
from moesaic.kernels.promised import PromisedRows
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.prefix.blocks import BLOCK_SIZE, BlockHasher

LIMITS = EngineLimits(
    max_num_seqs=8,
    max_num_batched_tokens=24,
    max_num_queued_reqs=64,
    max_num_queued_tokens=4096,
    max_model_len=256,
    sweep_blocks=40,
)
CPU = torch.device("cpu")
NUM_LAYERS = 3  # of the tiny model
HASHER = BlockHasher(b"secret", "tiny", BLOCK_SIZE)


class FlakyDispatcher(LocalDispatcher):
    """Real experts that can be taken away: the next ``failures`` layer calls fail, or no step can
    begin at all."""

    failures = 0
    gone = False
    has_lost = False  # some experts of the substitution are served by united ones alone
    turns = 0  # of the event loop that a layer takes, as if its experts were elsewhere

    def __init__(self, *how: Any) -> None:
        super().__init__(*how)
        self.asked: list[tuple[int, int]] = []  # layer, rows
        self.sought = asyncio.Event()  # no step could begin, and the engine waits

    def begin_step(self) -> Step:
        if self.gone:
            raise NotReady("the experts were taken away", code="expert_unavailable")
        return replace(super().begin_step(), has_lost=self.has_lost)

    def adopt(self, loaded: LoadedSubstitution | None) -> None:
        super().adopt(loaded)
        self.has_lost = False

    async def dispatch(
        self,
        step: Step,
        layer: int,
        hidden_states: Tensor,
        promised: PromisedRows | None = None,
    ) -> Tensor:
        if layer == 1 and self.failures:
            self.failures -= 1
            raise ExpertUnavailable(layer, cause="test")
        self.asked.append((layer, len(hidden_states)))
        for _ in range(self.turns):
            await asyncio.sleep(0)
        return await super().dispatch(step, layer, hidden_states, promised)

    async def reachable(self) -> None:
        if self.gone:
            self.sought.set()
            await asyncio.Event().wait()


class Rig:
    """An engine, its dispatcher, and the events it told.

    Attributes:
        calls: how many events were told at once.
    """

    engine: Engine
    dispatcher: FlakyDispatcher

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[int] = []
        self._told = asyncio.Event()

    def tell(self, events: list[Event]) -> None:
        """Take the events that the engine tells."""
        self.events.extend(events)
        self.calls.append(len(events))
        self._told.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds of what was told."""
        while not condition():
            self._told.clear()
            await self._told.wait()

    async def ended(self, *names: str) -> None:
        """Wait until these requests have ended."""
        left, seen = set(names), 0

        def all_ended() -> bool:
            nonlocal seen
            for event in self.events[seen:]:
                if isinstance(event, FinishEvent | FailureEvent):
                    left.discard(event.key.request_id)
            seen = len(self.events)
            return not left

        await self.until(all_ended)

    def submit(
        self, name: str, tokens: Sequence[int], task: GenerationTask | ScoringTask, **more: Any
    ) -> None:
        self.engine.submit(Request(RequestKey(name), tuple(tokens), task, **more))

    def tokens(self, name: str) -> list[int]:
        told = [e for e in self.events if isinstance(e, TokenEvent) and e.key.request_id == name]
        assert [e.index for e in told] == list(range(len(told)))
        return [e.token_id for e in told]

    def events_of(self, name: str) -> list[Event]:
        told = (TokenEvent, ScoreEvent)
        return [e for e in self.events if isinstance(e, told) and e.key.request_id == name]

    def scores(self, name: str) -> tuple[float, ...]:
        [told] = [e for e in self.events if isinstance(e, ScoreEvent) and e.key.request_id == name]
        return told.logprobs

    def cached(self, name: str) -> int:
        finish = self.last(name)
        assert isinstance(finish, FinishEvent)
        return finish.cached_tokens

    def last(self, name: str) -> Event:
        return [e for e in self.events if e.key.request_id == name][-1]


class Halves:
    """A ``Shortcut`` that computes steps in two parts, one after the other."""

    def __init__(self, decoder: Decoder, dispatcher: LocalDispatcher, cache: KVCache) -> None:
        self._decoder, self._cache, self.num_cut = decoder, cache, 0

    @property
    def layers_done(self) -> int:
        return 0

    def num_parts(self, num_rows: int) -> int:
        return min(2, num_rows)

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        assert isinstance(step, LocalStep)
        whole = self._decoder.whole_steps(self._cache, step.experts.kernels)
        assert whole is not None
        self.num_cut += len(batches) > 1
        return torch.cat([whole.forward(batch) for batch in batches])


@asynccontextmanager
async def rig(
    tiny_model: Any,
    num_blocks: int = 64,
    recovery_s: float = 5.0,
    hasher: BlockHasher | None = HASHER,
    limits: EngineLimits = LIMITS,
    shortcut: Callable[[Decoder, LocalDispatcher, KVCache], Shortcut] | None = None,
    step_target_s: float = 0.0,
) -> AsyncIterator[Rig]:
    checkpoint, config = Checkpoint(tiny_model.directory), load_config(tiny_model.directory)
    decoder = Decoder.load(checkpoint, config, torch.float32, CPU)
    dispatcher = FlakyDispatcher(checkpoint, config, torch.float32, CPU)
    r = Rig()
    r.dispatcher = dispatcher
    r.engine = engine = Engine(
        decoder,
        dispatcher,
        limits,
        num_blocks,
        r.tell,
        recovery_s,
        hasher,
        shortcut=lambda cache: shortcut(decoder, dispatcher, cache) if shortcut else None,
        step_target_s=step_target_s,
    )
    running = asyncio.create_task(engine.run())
    try:
        yield r
        assert engine.load().kv_blocks_used == 0
        assert engine.load().num_running == engine.load().num_waiting == 0
        assert engine.batcher.sweeps.area.num_used == 0
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def prompts(count: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, 60, (count,), generator=generator).tolist()
    return {
        f"r{i}": torch.randint(2, 160, (length,), generator=generator).tolist()
        for i, length in enumerate(lengths)
    }
