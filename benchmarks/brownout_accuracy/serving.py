"""An engine in this process, with all experts in it: its steps are those of a worker of topology ``local``."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moesaic.dispatch.contract import Step
from moesaic.dispatch.local import LocalDispatcher, LocalStep
from moesaic.dispatch.substitution import LoadedSubstitution
from moesaic.engine.engine import Engine
from moesaic.engine.sequences.requests import (
    Degradation,
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    PromptEvent,
    Request,
    RequestKey,
    ScoreEvent,
    ScoringTask,
    TokenEvent,
)
from moesaic.engine.shortcuts import LocalSteps, Shortcut
from moesaic.engine.steps.admission import EngineLimits
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.whole_steps import WholeSteps
from moesaic.models.weights.checkpoint import Checkpoint

LIMITS = EngineLimits(
    max_num_seqs=32,
    max_num_batched_tokens=512,
    max_num_queued_reqs=1 << 20,
    max_num_queued_tokens=1 << 30,
    max_model_len=2048,
)
NUM_BLOCKS = 2048
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Ask:
    """A prompt, and what is asked of it."""

    prompt: tuple[int, ...]
    task: GenerationTask | ScoringTask


@dataclass
class Told:
    """The answer to a prompt.

    Attributes:
        tokens: generated tokens.
        logprobs: log-probabilities of the candidates, or of the prompt's tokens but the first.
        degradation: degradation that the engine reports.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    degradation: Degradation = field(default_factory=Degradation)


class OneEngine:
    """Answers prompts under one substitution and threshold after the other."""

    def __init__(self, directory: Path) -> None:
        """Read the model, without united experts."""
        config, checkpoint = load_config(directory), Checkpoint(directory)
        decoder = Decoder.load(checkpoint, config, torch.float32, CPU)
        self.dispatcher = LocalDispatcher(checkpoint, config, torch.float32, CPU)

        def shortcut(cache: KVCache) -> Shortcut | None:
            def whole_of(step: Step) -> WholeSteps | None:
                assert isinstance(step, LocalStep)
                return decoder.whole_steps(cache, step.experts.kernels)

            return LocalSteps(whole_of) if whole_of(self.dispatcher.begin_step()) else None

        self.engine = Engine(
            decoder, self.dispatcher, LIMITS, NUM_BLOCKS, self._take, 0.0, shortcut=shortcut
        )
        self._told: dict[str, Told] = {}
        self._names = itertools.count()  # the engine remembers what those that had much had
        self._left = 0
        self._error: Exception | None = None
        self._done = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine's steps meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            loop = tasks.create_task(self.engine.run())
            try:
                yield
            finally:
                loop.cancel()
                with suppress(asyncio.CancelledError):
                    await loop

    def degrade(self, loaded: LoadedSubstitution | None, threshold: float) -> None:
        """Degrade by a substitution, prompts and answers alike."""
        self.dispatcher.adopt(loaded)
        self.engine.set_brownout(
            BrownoutPolicy(
                mode="manual", prefill_threshold=threshold, decode_threshold=threshold
            ).checked()
        )

    async def answer(self, asked: Sequence[Ask]) -> list[Told]:
        """Answer prompts, as many together as the limits allow; nothing is cached from one to the next."""
        self._told = {str(next(self._names)): Told() for _ in asked}
        self._left = len(asked)
        self._done.clear()
        for name, ask in zip(self._told, asked, strict=True):
            self.engine.submit(Request(RequestKey(name), ask.prompt, ask.task))
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return list(self._told.values())

    def _take(self, events: list[Event]) -> None:
        for event in events:
            told = self._told[event.key.request_id]
            if isinstance(event, TokenEvent):
                told.tokens.append(event.token_id)
            elif isinstance(event, ScoreEvent):
                told.logprobs += event.logprobs
            elif isinstance(event, PromptEvent):
                told.logprobs += [each.logprob for each in event.logprobs]
            elif isinstance(event, FinishEvent):
                told.degradation = event.degradation
                self._left -= 1
            elif isinstance(event, FailureEvent):
                self._error, self._left = event.error, 0
        if self._left == 0:
            self._done.set()
