"""Experts read from a checkpoint, in the form that they are computed in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert


class PackedExperts:
    """Reads experts from a checkpoint and packs them; not for threads that stay, for it computes."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, layout: ExpertLayout) -> None:
        self._checkpoint, self._config, self.layout = checkpoint, config, layout

    def pack(self, layer: int, experts: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Fill ``rows``, uint8 ``[nbytes]`` each, with ``experts``.

        Raises:
            CheckpointError: a tensor is missing, mis-shaped or cannot be read.
        """
        for expert, row in zip(experts, rows, strict=True):
            read = load_expert(
                self._checkpoint,
                self._config,
                layer,
                expert,
                self.layout.dtype,
                torch.device("cpu"),
            )
            self.layout.pack(read.gate_up, read.down, row)

    def packed(self, layer: int, experts: Sequence[int]) -> Tensor:
        """Pack ``experts`` into new memory.

        Returns:
            uint8 ``[n, nbytes]``.
        """
        rows = torch.empty(len(experts), self.layout.nbytes, dtype=torch.uint8)
        self.pack(layer, experts, list(rows))
        return rows
