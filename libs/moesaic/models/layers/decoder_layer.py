"""One layer of a decoder, routed experts and their gate aside."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.kernels.decoder_step import Rotation
from moesaic.kernels.gated_mlp import GatedMLP
from moesaic.kernels.grouped_query import GroupedQueryKernel
from moesaic.models.configuration.architecture import LatentAttention, ModelConfig
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.layers.grouped_query import GroupedQueryLayer
from moesaic.models.layers.kv_cache import KVCache
from moesaic.models.layers.latent import LatentLayer
from moesaic.models.layers.mlp import SharedExpert, load_mlp
from moesaic.models.weights.tensor_reader import TensorReader


class AttentionLayer(Protocol):
    """The attention of one decoder layer."""

    def __call__(
        self, hidden_states: Tensor, rotation: Rotation, plan: AttentionPlan, cache: KVCache
    ) -> Tensor:
        """Write the rows' keys and values to the cache, and compute the rows that attend.

        Returns:
            ``[A, H]`` for ``[T, H]``.
        """
        ...


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer, routed experts and their gate aside."""

    attention_norm: Tensor  # [H]
    attention: AttentionLayer
    mlp_norm: Tensor  # [H]
    fused: GroupedQueryKernel | None  # attention and both norms in one call
    dense: GatedMLP | None  # None: a sparse layer
    shared: SharedExpert | None


def load_layer(reader: TensorReader, config: ModelConfig, index: int) -> DecoderLayer:
    """Read layer ``index`` of a model, or one rank's part of it; raises ``CheckpointError``."""
    attention = reader.under("self_attn.")
    dense = index not in config.moe_layers
    norm = reader.vector("input_layernorm.weight", config.hidden_size)
    mlp_norm = reader.vector("post_attention_layernorm.weight", config.hidden_size)
    layer: LatentLayer | GroupedQueryLayer
    if isinstance(config.attention, LatentAttention):
        layer, fused = LatentLayer.load(attention, config, config.attention, index), None
    else:
        layer = GroupedQueryLayer.load(attention, config, config.attention, index)
        fused = layer.between(norm, mlp_norm)
    return DecoderLayer(
        attention_norm=norm,
        attention=layer,
        mlp_norm=mlp_norm,
        fused=fused,
        dense=load_mlp(reader, config.hidden_size, config.dense_size) if dense else None,
        shared=None if dense else SharedExpert.load(reader, config, index),
    )
