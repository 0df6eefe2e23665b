"""Multi-head latent attention: DeepSeek-V2 (arXiv:2405.04434, section 2.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.linear import Linear
from moesaic.kernels.paged_attention import KVLayout
from moesaic.kernels.rms_norm import rms_norm
from moesaic.models.architecture import LatentAttention, ModelConfig
from moesaic.models.attention import attend
from moesaic.models.attention_plan import AttentionPlan
from moesaic.models.kv_cache import KVCache
from moesaic.models.rope import Rotation
from moesaic.models.tensor_reader import TensorReader

_LATENT_NORM_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps says


@dataclass(frozen=True)
class LatentLayer:
    """The attention of one decoder layer; a cached row is the normed latent, then the rotated key of all heads."""

    layer: int
    shape: LatentAttention
    q_kv_down: Linear  # H -> Q + kv_width; Q: q_lora_rank, or without one heads * (nope + rope)
    q_norm: Tensor | None  # [q_lora_rank]
    q_up: Linear | None  # q_lora_rank -> heads * (nope + rope)
    kv_norm: Tensor  # [latent]
    kv_up: Tensor  # [heads * (nope + v), latent]
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
            kv = reader.read("kv_a_proj_with_mqa.bias", shape.kv_width)
            if rank is None:  # a full query projection has none
                return torch.cat((kv.new_zeros(q_size), kv))
            return torch.cat((reader.read(f"{q_name}.bias", q_size), kv))

        q = reader.read(f"{q_name}.weight", q_size, hidden)
        kv = reader.read("kv_a_proj_with_mqa.weight", shape.kv_width, hidden)
        return cls(
            layer=layer,
            shape=shape,
            q_kv_down=reader.linear(torch.cat((q, kv)), down_bias() if shape.bias else None),
            q_norm=None if rank is None else reader.read("q_a_layernorm.weight", rank),
            q_up=None
            if rank is None
            else reader.linear(reader.read("q_b_proj.weight", heads * qk_dim, rank)),
            kv_norm=reader.read("kv_a_layernorm.weight", shape.kv_lora_rank),
            kv_up=reader.read("kv_b_proj.weight", up_size, shape.kv_lora_rank),
            output=reader.linear(
                reader.read("o_proj.weight", hidden, heads * shape.v_head_dim),
                reader.read("o_proj.bias", hidden) if shape.bias else None,
            ),
            scale=qk_dim**-0.5 * (config.rope.yarn.softmax_scale if config.rope.yarn else 1.0),
        )

    def __call__(
        self, hidden_states: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVCache
    ) -> Tensor:
        """See ``AttentionLayer``."""
        shape = self.shape
        down = self.q_kv_down(hidden_states)
        queries, latent, rope_key = torch.split(
            down, [down.shape[1] - shape.kv_width, shape.kv_lora_rank, shape.qk_rope_head_dim], -1
        )
        if plan.paged is not None:
            attended = self._attend_on_gpu(queries, latent, rope_key, rotation, plan, cache)
            return self.output(attended)
        latent = rms_norm(latent, self.kv_norm, _LATENT_NORM_EPS)
        rope_key = rotation(rope_key.unsqueeze(1)).squeeze(1)
        cache.write(self.layer, plan.write_slots, torch.cat((latent, rope_key), dim=-1))

        nope, rope = self._query_parts(self._project_queries(queries))
        queries = torch.cat((nope, rotation(rope)), dim=-1)  # [T, heads, nope + rope]
        attended = attend(self, queries, plan, cache, self.layer)
        return self.output(attended)

    def _project_queries(self, queries: Tensor) -> Tensor:
        if self.q_up is not None:
            queries = rms_norm(queries, self.q_norm, _LATENT_NORM_EPS)
            queries = self.q_up(queries)
        return queries.view(len(queries), self.shape.num_heads, -1)

    def _attend_on_gpu(
        self,
        queries: Tensor,
        latent: Tensor,
        rope_key: Tensor,
        rotation: Rotation,
        plan: AttentionPlan,
        cache: KVCache,
    ) -> Tensor:
        """All rows as in ``single``: latents are read where they lie, and never expanded."""
        from moesaic.kernels.kv_rows_triton import rotate, store_latent

        assert plan.paged is not None
        shape, rows = self.shape, cache.rows(self.layer)
        turn = (rotation.cos.squeeze(1), rotation.sin.squeeze(1), rotation.interleaved)
        slots = plan.write_slots
        store_latent(latent, self.kv_norm, _LATENT_NORM_EPS, rope_key, *turn, slots, rows)

        key_up, value_up = self._up_projections()
        nope, rope = self._query_parts(self._project_queries(queries))
        absorbed = nope.new_empty(len(nope), shape.num_heads, shape.kv_width)
        absorbed[..., : shape.kv_lora_rank] = torch.einsum("thn,hnl->thl", nope, key_up)
        rotate(rope, *turn, absorbed[..., shape.kv_lora_rank :])
        layout = KVLayout.latent(shape.kv_lora_rank, shape.qk_rope_head_dim)
        summed = plan.paged.attend(absorbed, rows, layout, self.scale)
        by_head = summed.view(len(summed), shape.num_heads, -1)  # [T, heads, latent]
        return torch.einsum("thl,hvl->thv", by_head, value_up).flatten(1)

    def single(self, queries: Tensor, cached: Tensor, mask: Tensor) -> Tensor:
        """See ``Heads.single``. The up-projections are absorbed: scores and sums are over latents."""
        key_up, value_up = self._up_projections()
        nope, rope = self._query_parts(queries)
        latent_queries = torch.einsum("bhn,hnl->bhl", nope, key_up)
        grouped = torch.cat((latent_queries, rope), dim=-1).unsqueeze(1)  # [B, 1, heads, kv_width]
        shared = cached.unsqueeze(1)  # [B, 1, L, kv_width]: keys; values but for the last columns
        out = F.scaled_dot_product_attention(
            grouped, shared, shared, attn_mask=mask, scale=self.scale
        )
        latent = out[:, 0, :, : self.shape.kv_lora_rank]  # [B, heads, latent]
        return torch.einsum("bhl,hvl->bhv", latent, value_up).flatten(1)

    def run(self, queries: Tensor, cached: Tensor, mask: Tensor | None) -> Tensor:
        """See ``Heads.run``. Over many rows, expanding keys and values beats the wide latents."""
        rank = self.shape.kv_lora_rank
        latent, rope_key = cached[:, :rank], cached[:, rank:]
        key_up, value_up = self._up_projections()
        nope = torch.einsum("sl,hnl->hsn", latent, key_up)
        rope = rope_key.expand(len(nope), -1, -1)
        keys = torch.cat((nope, rope), dim=-1)  # [heads, L, nope + rope]
        values = torch.einsum("sl,hvl->hsv", latent, value_up)
        # With values as wide as keys torch has a fused attention that never holds all scores.
        padded = F.pad(values, (0, max(0, keys.shape[-1] - values.shape[-1])))
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1).unsqueeze(0),
            keys.unsqueeze(0),
            padded.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
        )
        return out[0, ..., : self.shape.v_head_dim].transpose(0, 1).flatten(1)

    def _query_parts(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        width = self.shape.qk_nope_head_dim
        return queries[..., :width], queries[..., width:]

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Views of ``kv_up``: for keys ``[heads, nope, latent]``, for values ``[heads, v, latent]``."""
        by_head = self.kv_up.view(self.shape.num_heads, -1, self.shape.kv_lora_rank)
        return by_head[:, : self.shape.qk_nope_head_dim], by_head[:, self.shape.qk_nope_head_dim :]
