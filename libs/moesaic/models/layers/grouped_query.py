"""Grouped-query attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.decoder_step import Rotation
from moesaic.kernels.grouped_query import GroupedQueryKernel, StepOfRows
from moesaic.kernels.kv_rows import store_grouped
from moesaic.kernels.linear import Linear, PackedLinear
from moesaic.kernels.paged_attention import shape_of
from moesaic.kernels.paged_rows import KVLayout
from moesaic.models.configuration.architecture import GroupedQueryAttention, ModelConfig
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.weights.tensor_reader import TensorReader
from moesaic.native.structs import ShapeArgs


@dataclass(frozen=True)
class GroupedQueryLayer:
    """The attention of one decoder layer; a cached row is the rotated keys, then the values."""

    layer: int
    shape: GroupedQueryAttention
    qkv: Linear  # H -> (heads + 2 kv_heads) * d
    kv: Linear  # the last part of it, H -> 2 kv_heads * d
    qk_norm: Tensor | None  # [heads + kv_heads, d]: weights for all queries, and for all keys
    eps: float
    output: Linear  # heads * d -> H
    sinks: Tensor | None  # float32 [heads]

    @classmethod
    def load(
        cls, reader: TensorReader, config: ModelConfig, shape: GroupedQueryAttention, layer: int
    ) -> "GroupedQueryLayer":
        """Read the layer's weights from under ``...self_attn.``; raises ``CheckpointError``."""
        hidden, dim = config.hidden_size, shape.head_dim
        num_kv = shape.num_kv_heads
        sizes = {"q_proj": shape.num_heads * dim, "k_proj": num_kv * dim, "v_proj": num_kv * dim}

        def qk_norm() -> Tensor:
            norms = []
            for name, heads in (("q_norm", shape.num_heads), ("k_norm", num_kv)):
                weight = reader.vector(f"{name}.weight", heads * dim if shape.wide_qk_norm else dim)
                norms.append(weight.view(-1, dim).expand(heads, -1))
            return torch.cat(norms)

        def qkv_bias() -> Tensor:
            return torch.cat([reader.vector(f"{name}.bias", size) for name, size in sizes.items()])

        weights = [reader.weight(f"{name}.weight", size, hidden) for name, size in sizes.items()]
        qkv = reader.linear(reader.joined(*weights), qkv_bias() if shape.qkv_bias else None)
        return cls(
            layer=layer,
            shape=shape,
            qkv=qkv,
            kv=qkv.behind(sizes["q_proj"]),
            qk_norm=qk_norm() if shape.qk_norm else None,
            eps=config.rms_norm_eps,
            output=reader.linear(
                reader.weight("o_proj.weight", hidden, shape.num_heads * dim),
                reader.vector("o_proj.bias", hidden) if shape.output_bias else None,
            ),
            sinks=reader.read("sinks", shape.num_heads).float() if shape.sinks else None,
        )

    def __call__(
        self, hidden_states: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVCache
    ) -> Tensor:
        """See ``AttentionLayer``."""
        offsets, attending = plan.write_offsets, plan.attending
        if attending is not None:
            self._store(self.kv(hidden_states), 0, rotation, offsets, cache)
            hidden_states, rotation = hidden_states[attending], rotation.of(attending)
            # Written already
            offsets = torch.full_like(attending, -1)
        qkv = self.qkv(hidden_states)
        queries = self._store(qkv, self.shape.num_heads, rotation, offsets, cache)
        layout = KVLayout.grouped(self.shape.num_kv_heads, self.shape.head_dim)
        scale, window = self.shape.softmax_scale, self.shape.window_of(self.layer)
        rows = cache.rows(self.layer)
        return self.output(plan.attend(queries, rows, layout, scale, window, self.sinks))

    def between(self, norm: Tensor, norm_behind: Tensor) -> GroupedQueryKernel | None:
        """Combine this layer with the norms before and after it, ``[H]`` each, into one call.

        Returns:
            None if that cannot be.
        """
        qkv, output = self.qkv, self.output
        if not (isinstance(qkv, PackedLinear) and isinstance(output, PackedLinear)):
            return None
        return GroupedQueryKernel(
            *(qkv.matrix, output.matrix, norm, self.qk_norm, norm_behind, self.eps),
            is_wide=self.shape.wide_qk_norm,
            clip=self.shape.clip,
            window=self.shape.window_of(self.layer),
            sinks=self.sinks,
        )

    def step_of(self, rotation: Rotation, plan: AttentionPlan) -> StepOfRows:
        """Describe a step's rows for every layer's call, if all of them attend."""
        [rows] = plan.groups
        lying = self.lying(plan.block_size)
        turn = (rotation.cos, rotation.sin, rotation.interleaved)
        return StepOfRows(lying, *turn, plan.write_offsets, rows)

    def lying(self, block_size: int) -> ShapeArgs:
        """Describe the place of heads in the projection and in a CPU's cache, for layers with any window."""
        heads, kv_heads, dim = (
            self.shape.num_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
        )
        layout, width = KVLayout.grouped(kv_heads, dim), (heads + 2 * kv_heads) * dim
        return shape_of(layout, heads, width, block_size, None, self.shape.softmax_scale)

    def _store(
        self, projected: Tensor, num_heads: int, rotation: Rotation, offsets: Tensor, cache: KVCache
    ) -> Tensor:
        """Write the projected keys and values to the cache.

        Returns:
            The queries of ``num_heads``, which come first.
        """
        norms = self.qk_norm
        return store_grouped(
            projected.view(len(projected), -1, self.shape.head_dim),
            num_heads,
            None if norms is None else norms[self.shape.num_heads - num_heads :],
            self.eps,
            rotation.cos,
            rotation.sin,
            rotation.interleaved,
            offsets,
            cache.rows(self.layer),
            cache.block_size,
            is_wide=self.shape.wide_qk_norm,
            clip=self.shape.clip,
        )
