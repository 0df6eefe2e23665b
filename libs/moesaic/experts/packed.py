"""Experts read from a checkpoint, in the form that they are computed in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.held_bytes import Quantization
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.on_threads import on_threads


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


class PackedExperts:
    """Reads experts from a checkpoint and packs them; not for threads that stay, for it computes."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, layout: ExpertLayout) -> None:
        self.experts, self.layout = LogicalExperts(checkpoint, config), layout

    def pack(self, layer: int, experts: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Fill ``rows``, uint8 ``[nbytes]`` each, with ``experts``, by their weights ids.

        Raises:
            CheckpointError: a tensor is missing, mis-shaped or cannot be read.
        """
        dtype = None if self.layout.packs_stored else self.layout.dtype
        host = torch.device("cpu")

        def pack(place: int) -> None:
            read = self.experts.read(layer, experts[place], dtype, host, lent=True)
            self.layout.pack(read.gate_up, read.down, rows[place], read.biases)

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
