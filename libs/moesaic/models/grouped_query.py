"""Grouped-query attention: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.linear import Linear
from moesaic.kernels.paged_attention import KVLayout
from moesaic.kernels.rms_norm import rms_norm
from moesaic.models.architecture import GroupedQueryAttention, ModelConfig
from moesaic.models.attention import attend
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
        num_heads = self.shape.num_heads
        num_rotated = num_heads + self.shape.num_kv_heads
        qkv = self.qkv(hidden_states)
        qkv = qkv.view(len(qkv), -1, self.shape.head_dim)
        if plan.paged is not None:
            return self.output(self._attend_on_gpu(qkv, rotation, plan, cache))
        qk = qkv[:, :num_rotated]  # queries and keys are normed and rotated alike, so together
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, self.eps)
        qk = rotation(qk)
        keys_values = torch.cat((qk[:, num_heads:], qkv[:, num_rotated:]), dim=1)
        cache.write(self.layer, plan.write_slots, keys_values.flatten(1))
        attended = attend(self, qk[:, :num_heads], plan, cache, self.layer)
        return self.output(attended)

    def _attend_on_gpu(
        self, qkv: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVCache
    ) -> Tensor:
        from moesaic.kernels.kv_rows_triton import store_grouped

        assert plan.paged is not None
        rows = cache.rows(self.layer)
        queries = store_grouped(
            qkv,
            self.shape.num_heads,
            self.qk_norm,
            self.eps,
            rotation.cos.squeeze(1),
            rotation.sin.squeeze(1),
            rotation.interleaved,
            plan.write_slots,
            rows,
        )
        layout = KVLayout.grouped(self.shape.num_kv_heads, self.shape.head_dim)
        return plan.paged.attend(queries, rows, layout, self.shape.head_dim**-0.5)

    def single(self, queries: Tensor, cached: Tensor, mask: Tensor) -> Tensor:
        """See ``Heads.single``. The heads of a group are rows of one product: keys are read once for all of them."""
        keys, values = self._keys_values(cached)  # [B, kv_heads, L, d]
        by_group = (len(queries), self.shape.num_kv_heads, -1, self.shape.head_dim)
        grouped = queries.reshape(by_group)  # [B, kv_heads, group, d]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return out.flatten(1)

    def run(self, queries: Tensor, cached: Tensor, mask: Tensor | None) -> Tensor:
        """See ``Heads.run``."""
        keys, values = self._keys_values(cached.unsqueeze(0))
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1).flatten(1)

    def _keys_values(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*cached.shape[:2], 2, self.shape.num_kv_heads, self.shape.head_dim)
        keys, values = cached.view(shape).unbind(2)  # [B, L, kv_heads, d]
        return keys.transpose(1, 2), values.transpose(1, 2)
