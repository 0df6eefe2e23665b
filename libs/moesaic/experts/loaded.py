"""Experts in memory, to compute with and for peers to pull."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.experts.pace import LoadPace
from moesaic.experts.packed import layout_of
from moesaic.experts.pieces import digests_of
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.held_bytes import Quantization
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.native.memory import huge_pages
from moesaic.transport.device_memory import settle

Bring = Callable[[int, int], "LoadedExpert"]
"""Loads one expert, given its layer and weights id, on a thread of its own; raises ``MoesaicError``."""


@dataclass(frozen=True)
class LoadedExpert:
    """An expert's weights, in one copy."""

    mlp: GatedMLP
    packed: Tensor | None = None  # uint8 [nbytes], the memory of ``mlp``; None: peers do not get it
    digests: Tensor | None = None  # int64 [pieces], taken when a worker read it from the checkpoint


class ExpertFiles:
    """Reads experts and packs them for this machine.

    Attributes:
        experts: by their weights ids.
        progress: of loading.
        device: that computes with them.
        layout: of their bytes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
        *,
        for_peers: bool = True,
    ) -> None:
        """Read nothing yet; of experts that are not ``for_peers`` no digests are taken."""
        self._for_peers, self.progress = for_peers, checkpoint.progress
        self.experts, self.device = LogicalExperts(checkpoint, config), device
        on_cpu = device.type == "cpu"
        if quantization != "none" and not on_cpu:
            raise InvalidInput("quantization", "is for CPUs; on a GPU it must be none")
        self.layout = layout_of(config, dtype, quantization, as_stored=not on_cpu)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in memory."""
        return self.layout.nbytes

    def note_pulled(self, layer: int, expert: int) -> None:
        """Count an expert that came from a peer as loaded."""
        self.progress.add(self.experts.stored_bytes(layer, expert))

    def bring(self, pace: LoadPace) -> Bring:
        """A loader at this pace, of experts by their weights ids.

        Returns:
            A function that raises ``CheckpointError`` if a tensor is missing, mis-shaped or cannot
            be read, and ``NotReady`` if the loading was cancelled.
        """

        def bring(layer: int, expert: int) -> LoadedExpert:
            with pace.working():
                return self._read(layer, expert)

        return bring

    def _read(self, layer: int, expert: int) -> LoadedExpert:
        layout, host = self.layout, torch.device("cpu")
        dtype = None if layout.packs_stored else layout.dtype
        read = self.experts.read(layer, expert, dtype, host, lent=True)
        # Zeros, for the gaps between the parts are sent and compared too.
        packed = huge_pages.zeros((layout.nbytes,), torch.uint8)
        layout.pack(read.gate_up, read.down, packed, read.biases)
        digests = digests_of(packed.unsqueeze(0))[0] if self._for_peers else None
        packed = packed.to(self.device)
        settle(self.device)  # peers are given it on another thread
        return LoadedExpert(layout.view(packed), packed, digests)
