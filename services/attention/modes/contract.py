"""The promise of a mode: opened with the parts of a worker, it gives back a ``Mode``."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from moesaic.cluster.service import Process
from moesaic.dispatch.contract import Dispatcher
from moesaic.dispatch.substitution import Degrading
from moesaic.engine.shortcuts import Shortcut
from moesaic.engine.thread import EngineThread
from moesaic.kernels.linear import activation_dtype
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.decoder import Decoder, MoELayer
from moesaic.models.layers.gate import Gate, load_gates
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.warm_up import experts_elsewhere
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.served import held_dtype
from moesaic.services.attention.settings import AttentionSettings
from moesaic.transport.device_memory import device_named
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.opening import OpenNetwork, open_network


@dataclass(frozen=True)
class WorkerParts:
    """The parts of a worker that every mode finds there.

    Attributes:
        process: in its cluster; what a mode opens is closed with its parts.
        config: with the digest of the weights.
        checkpoint: the weights.
        decoder: all of the model but its routed experts.
        thread: of the engine.
    """

    process: Process[AttentionSettings]
    config: ModelConfig
    checkpoint: Checkpoint
    decoder: Decoder
    thread: EngineThread

    @property
    def settings(self) -> AttentionSettings:
        """The settings, with the worker id and with addresses of this machine."""
        return self.process.settings

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights in memory."""
        return held_dtype(self.settings, self.config)

    @property
    def device(self) -> torch.device:
        """The device that steps are computed on."""
        return device_named(self.settings.device)

    def load_gates(self) -> dict[int, Gate]:
        """Read the gates, by decoder layer."""
        return load_gates(self.checkpoint, self.config, self.dtype, self.device)

    async def open_network(
        self, limits: FrameLimits, thread: EngineThread, device: torch.device | None = None
    ) -> OpenNetwork:
        """Open a network on the event loop of ``thread``, until the worker ends.

        ``device`` has the tensors, if it is not the host that sends and receives them.
        """
        digest = self.config.digest
        opening = open_network(self.settings, "attention", digest, limits, thread.run, device)
        return await self.process.enter(opening)


def row_dtype(settings: AttentionSettings, config: ModelConfig) -> torch.dtype:
    """The type of activations and KV."""
    return activation_dtype(held_dtype(settings, config), device_named(settings.device))


def no_shortcut(cache: KVCache) -> Shortcut | None:
    """Compute all steps by the dispatcher."""
    return None


async def start_at_once() -> float:
    """Wait for nobody, and measure nothing."""
    return 0.0


@dataclass(frozen=True)
class Mode:
    """One way for rows and experts to meet, open in one worker.

    Attributes:
        dispatcher: computes the routed experts of each step; lives on the engine's thread.
        data_address: where other workers reach this one, ``host:port``; empty: none does.
        share: the experts that other attention workers have from here, like ``0/2``; empty: none.
        shortcut: makes, of the engine's KV cache, what computes whole steps without the dispatcher.
        start: awaited once others can find this worker, to find them and to measure. Gives how many
            times as long the largest step takes for transfers that it does not hide; 0: none.
        experts: computes the experts of made-up steps; by default, nobody does.
        degrading: what degrades choices here as the policy says; None: the placement says it, or nothing can.
    """

    dispatcher: Dispatcher
    data_address: str = ""
    share: str = ""
    shortcut: Callable[[KVCache], Shortcut | None] = no_shortcut
    start: Callable[[], Awaitable[float]] = start_at_once
    experts: MoELayer = experts_elsewhere
    degrading: Degrading | None = None


OpenMode = Callable[[WorkerParts], Awaitable[Mode]]
PlanMode = Callable[[AttentionSettings, ModelConfig], OpenMode]
"""Refuses settings that cannot work, before the process listens; called on a thread of its own."""
