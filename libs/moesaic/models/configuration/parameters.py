"""The number of a model's parameters by part, from its configuration. Needs no torch."""

from dataclasses import astuple, dataclass

from moesaic.models.configuration.architecture import LatentAttention, ModelConfig


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of all layers together; layers that predict further tokens are not counted.

    Attributes:
        embedding: of the tokens.
        head: 0 if it is tied to the embedding.
        attention: with its norms and biases, the MLPs' norms and the final one.
        dense: MLPs of layers without experts.
        shared: shared experts and their gates.
        gates: with their biases and corrections.
        experts: routed ones.
    """

    embedding: int
    head: int
    attention: int
    dense: int
    shared: int
    gates: int
    experts: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Count the parameters of a model."""
    hidden, moe, sparse = config.hidden_size, config.moe, len(config.moe_layers)
    table = config.vocab_size * hidden
    gate = moe.num_experts * (hidden + moe.correction_bias + moe.gate_bias)
    shared = 3 * hidden * moe.shared_expert_size + hidden * moe.shared_expert_gated
    norms = (2 * config.num_layers + 1) * hidden
    return ParameterCounts(
        embedding=table,
        head=0 if config.tie_word_embeddings else table,
        attention=config.num_layers * _attention(config) + norms,
        dense=(config.num_layers - sparse) * 3 * hidden * config.dense_size,
        shared=sparse * shared,
        gates=sparse * gate,
        experts=sparse * moe.num_experts * config.expert_parameters,
    )


def _attention(config: ModelConfig) -> int:
    how, hidden = config.attention, config.hidden_size
    if isinstance(how, LatentAttention):
        queries = how.num_heads * (how.qk_nope_head_dim + how.qk_rope_head_dim)
        values, rank = how.num_heads * how.v_head_dim, how.kv_lora_rank
        count = hidden * (how.kv_width + values) + rank
        count += rank * (how.num_heads * how.qk_nope_head_dim + values)
        biases = how.kv_width + hidden
        if how.q_lora_rank is None:
            return count + hidden * queries + how.bias * biases
        count += how.q_lora_rank * (hidden + queries + 1)
        return count + how.bias * (biases + how.q_lora_rank)
    queries, keys = how.num_heads * how.head_dim, how.num_kv_heads * how.head_dim
    normed = queries + keys if how.wide_qk_norm else 2 * how.head_dim
    return (
        hidden * (2 * queries + 2 * keys)
        + how.qk_norm * normed
        + how.qkv_bias * (queries + 2 * keys)
        + how.output_bias * hidden
        + how.sinks * how.num_heads
    )
