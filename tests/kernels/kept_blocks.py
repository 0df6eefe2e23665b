"""How the CPU's kernels keep what the reference keeps."""

import torch
from torch import Tensor

from moesaic.kernels.kv_rows import key_stride


def by_head(cached: Tensor, num_kv_heads: int, block_size: int) -> Tensor:
    """Of each block, each head's keys and then its values; keys dimension by dimension where they lie so."""
    dim = cached.shape[1] // 2 // num_kv_heads
    blocks = cached.view(-1, block_size, 2, num_kv_heads, dim).permute(0, 3, 2, 1, 4)
    keys, values = blocks.unbind(2)  # [blocks, heads, tokens, dim]
    if key_stride(block_size) != 1:
        keys = keys.transpose(2, 3)
    return torch.stack([keys.flatten(2), values.flatten(2)], dim=2).reshape(cached.shape)
