"""Grouped-query attention: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.grouped_query import GroupedQueryKernel, StepOfRows
from moesaic.kernels.kv_rows import store_grouped
from moesaic.kernels.linear import Linear, PackedLinear
from moesaic.kernels.native.library import Shape
from moesaic.kernels.paged_attention import KVLayout, shape_of
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
    kv: Linear  # the last part of it, H -> 2 kv_heads * d
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

        weights = [reader.read(f"{name}.weight", size, hidden) for name, size in sizes.items()]
        qkv = reader.linear(torch.cat(weights), qkv_bias() if shape.qkv_bias else None)
        return cls(
            layer=layer,
            shape=shape,
            qkv=qkv,
            kv=qkv.behind(sizes["q_proj"]),
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
        slots, attending = plan.write_slots, plan.attending
        if attending is not None:
            self._store(self.kv(hidden_states), 0, rotation, slots, cache)
            hidden_states, rotation = hidden_states[attending], rotation.of(attending)
            slots = torch.full_like(attending, -1)  # theirs are written
        qkv = self.qkv(hidden_states)
        queries = self._store(qkv, self.shape.num_heads, rotation, slots, cache)
        layout = KVLayout.grouped(self.shape.num_kv_heads, self.shape.head_dim)
        rows = cache.rows(self.layer)
        return self.output(plan.attend(queries, rows, layout, self.shape.head_dim**-0.5))

    def between(self, norm: Tensor, norm_behind: Tensor) -> GroupedQueryKernel | None:
        """This layer with the norms before and behind it, ``[H]`` each, where that can be one call."""
        qkv, output = self.qkv, self.output
        if not (isinstance(qkv, PackedLinear) and isinstance(output, PackedLinear)):
            return None
        return GroupedQueryKernel(
            qkv.matrix, output.matrix, norm, self.qk_norm, norm_behind, self.eps
        )

    def step_of(self, rotation: Rotation, plan: AttentionPlan) -> StepOfRows:
        """What every layer's call is told of a step's rows, if all of them attend."""
        [rows] = plan.groups
        lying = self.lying(plan.block_size, plan.window)
        turn = (rotation.cos, rotation.sin, rotation.interleaved)
        return StepOfRows(lying, *turn, plan.write_slots, rows)

    def lying(self, block_size: int, window: int | None) -> Shape:
        """How heads lie in what is projected, and in a CPU's cache."""
        heads, kv_heads, dim = (
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
        )
        layout, width = KVLayout.grouped(kv_heads, dim), (heads + 2 * kv_heads) * dim
        return shape_of(layout, heads, width, block_size, window, dim**-0.5)

    def _store(
        self, projected: Tensor, num_heads: int, rotation: Rotation, slots: Tensor, cache: KVCache
    ) -> Tensor:
        """Write what is projected to keys and values; the queries of ``num_heads``, which come first."""
        norms = self.qk_norm
        return store_grouped(
            projected.view(len(projected), -1, self.shape.head_dim),
            num_heads,
            None if norms is None else norms[self.shape.num_heads - num_heads :],
            self.eps,
            rotation.cos,
            rotation.sin,
            rotation.interleaved,
            slots,
            cache.rows(self.layer),
            cache.block_size,
        )
