"""Grouped-query attention: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.kv_rows import store_grouped
from moesaic.kernels.linear import Linear
from moesaic.kernels.paged_attention import KVLayout
from moesaic.models.architecture import GroupedQueryAttention, ModelConfig
from moesaic.models.attention_plan import AttentionPlan
from moesaic.models.kv_cache import KVCache
from moesaic.models.rope import Rotation
from moesaic.models.tensor_reader import TensorReader


@dataclass(frozen=True)
class GroupedQueryLayer:
    """The attention of one decoder layer; a cached row is the rotated keys, then the values."""

    layer: int
    shape: GroupedQueryAttention
    qkv: Linear  # H -> (heads + 2 kv_heads) * d
    qk_norm: Tensor | None  # [heads + kv_heads, d]: one weight for all queries, one for all keys
    eps: float
    output: Linear  # heads * d -> H

    @classmethod
    def load(
        cls, reader: TensorReader, config: ModelConfig, shape: GroupedQueryAttention, layer: int
    ) -> "GroupedQueryLayer":
        """Read the layer's weights from under ``...self_attn.``; raises ``CheckpointError``."""
        hidden, dim = config.hidden_size, shape.head_dim
        num_kv = shape.num_kv_heads
        sizes = {"q_proj": shape.num_heads * dim, "k_proj": num_kv * dim, "v_proj": num_kv * dim}

        def qk_norm() -> Tensor:
            q, k = reader.read("q_norm.weight", dim), reader.read("k_norm.weight", dim)
            return torch.cat((q.expand(shape.num_heads, -1), k.expand(num_kv, -1)))

        def qkv_bias() -> Tensor:
            return torch.cat([reader.read(f"{name}.bias", size) for name, size in sizes.items()])

        qkv = [reader.read(f"{name}.weight", size, hidden) for name, size in sizes.items()]
        return cls(
            layer=layer,
            shape=shape,
            qkv=reader.linear(torch.cat(qkv), qkv_bias() if shape.qkv_bias else None),
            qk_norm=qk_norm() if shape.qk_norm else None,
            eps=config.rms_norm_eps,
            output=reader.linear(
                reader.read("o_proj.weight", hidden, shape.num_heads * dim),
                reader.read("o_proj.bias", hidden) if shape.output_bias else None,
            ),
        )

    def __call__(
        self, hidden_states: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVCache
    ) -> Tensor:
        """See ``AttentionLayer``."""
        qkv = self.qkv(hidden_states)
        rows = cache.rows(self.layer)
        queries = store_grouped(
            qkv.view(len(qkv), -1, self.shape.head_dim),
            self.shape.num_heads,
            self.qk_norm,
            self.eps,
            rotation.cos,
            rotation.sin,
            rotation.interleaved,
            plan.write_slots,
            rows,
            cache.block_size,
        )
        layout = KVLayout.grouped(self.shape.num_kv_heads, self.shape.head_dim)
        return self.output(plan.attend(queries, rows, layout, self.shape.head_dim**-0.5))
