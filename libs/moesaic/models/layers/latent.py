"""Multi-head latent attention: DeepSeek-V2 (arXiv:2405.04434, section 2.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.decoder_step import Rotation
from moesaic.kernels.kv_rows import rotate, store_latent
from moesaic.kernels.linear import HeadLinear, Linear
from moesaic.kernels.paged_rows import KVLayout
from moesaic.kernels.rms_norm import rms_norm
from moesaic.models.configuration.architecture import LatentAttention, ModelConfig
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.weights.tensor_reader import TensorReader

_LATENT_NORM_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says


@dataclass(frozen=True)
class LatentLayer:
    """The attention of one decoder layer; a cached row is the normed latent, then the rotated key of all heads."""

    layer: int
    shape: LatentAttention
    q_kv_down: Linear  # H -> Q + kv_width; Q: q_lora_rank, or without one heads * (nope + rope)
    kv_down: Linear  # the last part of it, H -> kv_width
    q_norm: Tensor | None  # [q_lora_rank]
    q_up: Linear | None  # q_lora_rank -> heads * (nope + rope)
    kv_norm: Tensor  # [latent]
    key_up: HeadLinear  # per head: nope -> latent, the transpose of what makes keys of latents
    value_up: HeadLinear  # per head: latent -> v
    output: Linear  # heads * v -> H
    scale: float

    @classmethod
    def load(
        cls, reader: TensorReader, config: ModelConfig, shape: LatentAttention, layer: int
    ) -> "LatentLayer":
        """Read the layer's weights from under ``...self_attn.``; raises ``CheckpointError``."""
        hidden, heads, rank = config.hidden_size, shape.num_heads, shape.q_lora_rank
        qk_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim
        up_size = heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        q_name, q_size = ("q_proj", heads * qk_dim) if rank is None else ("q_a_proj", rank)

        def down_bias() -> Tensor:
            kv = reader.vector("kv_a_proj_with_mqa.bias", shape.kv_width)
            # A full query projection has none.
            if rank is None:
                return torch.cat((kv.new_zeros(q_size), kv))
            return torch.cat((reader.vector(f"{q_name}.bias", q_size), kv))

        by_head = reader.numbers("kv_b_proj.weight", up_size, shape.kv_lora_rank).view(
            heads, -1, shape.kv_lora_rank
        )
        key_up, value_up = torch.split(by_head, [shape.qk_nope_head_dim, shape.v_head_dim], dim=1)
        q = reader.weight(f"{q_name}.weight", q_size, hidden)
        kv = reader.weight("kv_a_proj_with_mqa.weight", shape.kv_width, hidden)
        q_kv_down = reader.linear(reader.joined(q, kv), down_bias() if shape.bias else None)
        return cls(
            layer=layer,
            shape=shape,
            q_kv_down=q_kv_down,
            kv_down=q_kv_down.behind(q_size),
            q_norm=None if rank is None else reader.vector("q_a_layernorm.weight", rank),
            q_up=None
            if rank is None
            else reader.linear(reader.weight("q_b_proj.weight", heads * qk_dim, rank)),
            kv_norm=reader.vector("kv_a_layernorm.weight", shape.kv_lora_rank),
            key_up=HeadLinear(key_up.transpose(1, 2)),
            value_up=HeadLinear(value_up),
            output=reader.linear(
                reader.weight("o_proj.weight", hidden, heads * shape.v_head_dim),
                reader.vector("o_proj.bias", hidden) if shape.bias else None,
            ),
            scale=qk_dim**-0.5 * config.rope.softmax_scale,
        )

    def __call__(
        self, hidden_states: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVCache
    ) -> Tensor:
        """See ``AttentionLayer``. The up-projections are absorbed: scores and sums are over latents."""
        shape, rows, attending = self.shape, cache.rows(self.layer), plan.attending
        if attending is None:
            down = self.q_kv_down(hidden_states)
            self._store(down[:, -shape.kv_width :], rotation, plan.write_offsets, rows)
        else:
            self._store(self.kv_down(hidden_states), rotation, plan.write_offsets, rows)
            rotation, down = rotation.of(attending), self.q_kv_down(hidden_states[attending])
        turn = (rotation.cos, rotation.sin, rotation.interleaved)
        queries = self._project(down[:, : -shape.kv_width])
        nope, rope = torch.split(queries, [shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1)
        absorbed = queries.new_empty(len(queries), shape.num_heads, shape.kv_width)
        self.key_up(nope, absorbed[..., : shape.kv_lora_rank])
        rotate(rope, *turn, absorbed[..., shape.kv_lora_rank :])
        layout = KVLayout.latent(shape.kv_lora_rank, shape.qk_rope_head_dim)
        summed = plan.attend(absorbed, rows, layout, self.scale)
        values = queries.new_empty(len(queries), shape.num_heads, shape.v_head_dim)
        self.value_up(summed.view(len(summed), shape.num_heads, -1), values)
        return self.output(values.flatten(1))

    def _store(self, down: Tensor, rotation: Rotation, offsets: Tensor, rows: Tensor) -> None:
        """Write the projected latents and the keys of all heads, ``[T, kv_width]``, to the cache."""
        latent, rope_key = torch.split(
            down, [self.shape.kv_lora_rank, self.shape.qk_rope_head_dim], dim=-1
        )
        turn = (rotation.cos, rotation.sin, rotation.interleaved)
        store_latent(latent, self.kv_norm, _LATENT_NORM_EPS, rope_key, *turn, offsets, rows)

    def _project(self, queries: Tensor) -> Tensor:
        """Project queries up: ``[T, heads, nope + rope]``."""
        if self.q_up is not None:
            assert self.q_norm is not None
            queries = self.q_up(rms_norm(queries, self.q_norm, _LATENT_NORM_EPS))
        return queries.view(len(queries), self.shape.num_heads, -1)
