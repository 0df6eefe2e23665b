"""All weights of a grouped-query model in float32, as plain torch computes with them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.models.configuration.architecture import GroupedQueryAttention, ModelConfig
from moesaic.models.configuration.family import mlp_names
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert
from moesaic.models.weights.tensor_names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    layer_prefix,
    sparse_names,
)
from moesaic.models.weights.tensor_reader import TensorReader

Both = tuple[Tensor, Tensor]
"""``gate_up`` ``[2I, H]`` and ``down`` ``[H, I]`` of an MLP; of many behind another axis."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class FrozenLayer:
    """One decoder layer.

    Attributes:
        norm: before the attention, ``[H]``.
        mlp_norm: before the MLP, ``[H]``.
        qkv: weight and bias of the projections to queries, keys and values.
        qk_norm: of each head of queries and of keys, ``[d]`` each.
        output: weight and bias.
        gate: ``[E, H]``; None: a dense layer.
        experts: the routed experts; the only MLP of a dense layer.
        shared: the shared expert.
        shared_gate: ``[1, H]``.
    """

    norm: Tensor
    mlp_norm: Tensor
    qkv: tuple[tuple[Tensor, Tensor | None], ...]
    qk_norm: Both | None
    output: tuple[Tensor, Tensor | None]
    gate: Tensor | None
    experts: list[Both]
    shared: Both | None
    shared_gate: Tensor | None


@dataclass(frozen=True)
class FrozenWeights:
    """A model; no gradients go to its weights."""

    config: ModelConfig
    shape: GroupedQueryAttention
    embedding: Tensor
    layers: list[FrozenLayer]
    norm: Tensor
    head: Tensor

    @classmethod
    def load(cls, checkpoint: Checkpoint, config: ModelConfig) -> "FrozenWeights":
        """Read everything.

        Raises:
            InvalidInput: its attention is latent, which has no trainable form here.
            CheckpointError: a tensor is missing, mis-shaped or cannot be read.
        """
        shape = require_grouped_query(config)
        reader = _Reader(checkpoint, config, shape)
        table = (config.vocab_size, config.hidden_size)
        embedding = reader.read(EMBEDDING, *table)
        return cls(
            config,
            shape,
            embedding,
            [reader.layer(index) for index in range(config.num_layers)],
            reader.read(FINAL_NORM, config.hidden_size),
            embedding if config.tie_word_embeddings else reader.read(HEAD, *table),
        )


def require_grouped_query(config: ModelConfig) -> GroupedQueryAttention:
    """Return the shape of grouped-query attention; raises ``InvalidInput`` for a model of another kind."""
    shape, moe = config.attention, config.moe
    if (
        isinstance(shape, GroupedQueryAttention)
        and (shape.clip, shape.rotated_dim, shape.scale) == (None, None, None)
        and not (shape.sinks or moe.gate_bias)
        and not (shape.wide_qk_norm or config.rope.interleaved or moe.correction_bias)
        and (moe.scoring_func, moe.group_limited) == ("softmax", False)
        and moe.shared_expert_gated == (moe.shared_expert_size > 0)
        and (config.embedding_multiplier, config.logits_scaling) == (1.0, 1.0)
    ):
        return shape
    raise InvalidInput(
        "--joint-steps",
        f"a model of family {config.family} cannot be trained as a whole; give 0",
    )


def float32_bytes(checkpoint: Checkpoint, config: ModelConfig) -> int:
    """Estimate the memory that a model takes in float32, by its files."""
    stored = sum(stamp.size for stamp in checkpoint.files.values())
    return stored * (1 if config.dtype == "float32" else 2)


@dataclass(frozen=True)
class _Reader:
    checkpoint: Checkpoint
    config: ModelConfig
    shape: GroupedQueryAttention

    def read(self, name: str, *shape: int) -> Tensor:
        return self.checkpoint.read(name, shape, torch.float32, _CPU)

    def matrix(self, name: str, out: int, inner: int) -> Tensor:
        reader = TensorReader(
            self.checkpoint, torch.float32, _CPU, weight_format=self.config.weight_format
        )
        return reader.numbers(name, out, inner)

    def layer(self, index: int) -> FrozenLayer:
        shape, prefix, hidden = self.shape, layer_prefix(index), self.config.hidden_size
        own, sparse = f"{prefix}self_attn.", index in self.config.moe_layers
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        sizes = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        norms = (f"{own}q_norm.weight", f"{own}k_norm.weight")
        inner = self.config.moe.shared_expert_size if sparse else 0
        return FrozenLayer(
            norm=self.read(f"{prefix}input_layernorm.weight", hidden),
            mlp_norm=self.read(f"{prefix}post_attention_layernorm.weight", hidden),
            qkv=tuple(
                self._linear(own + name, size, hidden, shape.qkv_bias)
                for name, size in sizes.items()
            ),
            qk_norm=(self.read(norms[0], shape.head_dim), self.read(norms[1], shape.head_dim))
            if shape.qk_norm
            else None,
            output=self._linear(f"{own}o_proj", hidden, width, shape.output_bias),
            gate=self._gate(index) if sparse else None,
            experts=self._experts(index)
            if sparse
            else [self._mlp(f"{prefix}mlp.", self.config.dense_size)],
            shared=self._mlp(f"{prefix}mlp.shared_expert.", inner) if inner else None,
            shared_gate=self.read(f"{prefix}mlp.shared_expert_gate.weight", 1, hidden)
            if inner
            else None,
        )

    def _linear(
        self, name: str, out: int, inner: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight = self.matrix(f"{name}.weight", out, inner)
        return weight, self.read(f"{name}.bias", out) if biased else None

    def _gate(self, index: int) -> Tensor:
        name = layer_prefix(index) + sparse_names(self.config, self.checkpoint, index).gate
        return self.read(name, self.config.moe.num_experts, self.config.hidden_size)

    def _experts(self, index: int) -> list[Both]:
        loaded = (
            load_expert(self.checkpoint, self.config, index, expert, torch.float32, _CPU)
            for expert in range(self.config.moe.num_experts)
        )
        return [weights.numbers(torch.float32) for weights in loaded]

    def _mlp(self, prefix: str, size: int) -> Both:
        hidden = self.config.hidden_size
        *gate_up, last = mlp_names(prefix)
        down = self.matrix(last, hidden, size)
        return torch.cat([self.matrix(name, size, hidden) for name in gate_up]), down
