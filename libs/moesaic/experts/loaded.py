"""Experts in memory, to compute with and for peers to pull."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.experts.pace import LoadPace
from moesaic.experts.pieces import digests_of
from moesaic.kernels.coded_matrix import keeps_codes
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.held_bytes import Quantization
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.on_threads import on_threads
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


def layout_of(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: Quantization = "none",
    *,
    as_stored: bool = False,
) -> ExpertLayout:
    """Return the layout of a model's experts; see ``ExpertLayout``."""
    moe = config.moe
    return ExpertLayout(
        config.hidden_size,
        moe.expert_size,
        dtype,
        quantization,
        as_stored,
        biased=moe.expert_bias,
        activation=moe.activation,
        codes=None if config.weight_format is None else config.weight_format.held,
    )


class ExpertFiles:
    """Reads experts and packs them for this machine; not for threads that stay, for it computes.

    Attributes:
        experts: experts by weights id.
        progress: progress of loading.
        device: device that computes with them.
        layout: layout of their bytes.
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
        if quantization != "none" and device.type != "cpu":
            raise InvalidInput("quantization", "is for CPUs; on a GPU it must be none")
        self.layout = layout_of(config, dtype, quantization, as_stored=keeps_codes(device))

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
                return self._load(layer, expert)

        return bring

    def pack(self, layer: int, experts: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Fill ``rows``, uint8 ``[nbytes]`` each on the CPU, with ``experts``, by their weights ids.

        Raises:
            CheckpointError: a tensor is missing, mis-shaped or cannot be read.
        """
        layout, host = self.layout, torch.device("cpu")
        dtype = None if layout.packs_stored else layout.dtype

        def pack(place: int) -> None:
            read = self.experts.read(layer, experts[place], dtype, host, lent=True)
            layout.pack(read.gate_up, read.down, rows[place], read.biases)

        assert len(experts) == len(rows)
        on_threads(pack, range(len(rows)))

    def packed(self, layer: int, experts: Sequence[int]) -> Tensor:
        """Pack ``experts`` into new memory.

        Returns:
            uint8 ``[n, nbytes]``.
        """
        rows = torch.empty(len(experts), self.layout.nbytes, dtype=torch.uint8)
        self.pack(layer, experts, list(rows))
        return rows

    def _load(self, layer: int, expert: int) -> LoadedExpert:
        # Zeros, for the gaps between the parts are sent and compared too.
        packed = huge_pages.zeros((self.layout.nbytes,), torch.uint8)
        self.pack(layer, [expert], [packed])
        digests = digests_of(packed.unsqueeze(0))[0] if self._for_peers else None
        packed = packed.to(self.device)
        # Peers are given it on another thread.
        settle(self.device)
        return LoadedExpert(self.layout.view(packed), packed, digests)
