"""The paged KV cache: what attention keeps of past tokens, in blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.models.architecture import ModelConfig


class KVCache:
    """One row of ``config.kv_width`` numbers per layer and cached token.

    What a row means is the attention's affair: keys and values, or the latent and the shared
    rotated key. Token ``i`` of block ``b`` is row ``b * block_size + i``.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """Reserve ``num_blocks`` blocks of ``block_size`` tokens in every layer."""
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks * block_size, config.kv_width)
        self._layers = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self._layers)

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store ``rows`` ``[T, kv_width]`` at ``slots`` (int64 ``[T]``, no two the same)."""
        self._layers[layer].index_copy_(0, slots, rows)

    def rows(self, layer: int) -> Tensor:
        """All rows of a layer, ``[tokens, kv_width]``; not a copy."""
        return self._layers[layer]

    def gather(self, layer: int, slots: Tensor) -> Tensor:
        """The rows at ``slots`` (int64, any shape): ``[*slots.shape, kv_width]``."""
        rows = self._layers[layer].index_select(0, slots.reshape(-1))
        return rows.view(*slots.shape, -1)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer; no block is copied to twice."""
        if not pairs:
            return
        source, target = zip(*pairs, strict=True)
        for layer in self._layers:
            blocks = layer.view(self.num_blocks, self.block_size, -1)
            blocks[list(target)] = blocks[list(source)]
