"""The cost of computing with a model, from its configuration. Needs no torch."""

from moesaic.models.configuration.architecture import LatentAttention, ModelConfig
from moesaic.prefix.flops import (
    AttentionFlops,
    ModelFlops,
    gated_mlp,
    grouped_query,
    latent,
    saturation_flops,
)


def flops_of(config: ModelConfig) -> ModelFlops:
    """Derive the cost of tokens: active parameters, and attention layer by layer."""
    hidden_size, moe = config.hidden_size, config.moe
    sparse = 2 * hidden_size * moe.num_experts + moe.top_k * gated_mlp(hidden_size, moe.expert_size)
    sparse += gated_mlp(hidden_size, moe.shared_expert_size)
    sparse += 2 * hidden_size * moe.shared_expert_gated
    dense = gated_mlp(hidden_size, config.dense_size)
    num_sparse = len(config.moe_layers)
    feed_forward = num_sparse * sparse + (config.num_layers - num_sparse) * dense
    head = 2 * hidden_size * config.vocab_size
    attention = [_attention(config, layer) for layer in range(config.num_layers)]
    return ModelFlops(attention, feed_forward, head)


def step_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the FLOPs of a prefill step of ``num_tokens``, of prompts as long as the model takes."""
    flops = flops_of(config)
    whole, rest = divmod(num_tokens, config.max_positions)
    return whole * flops.span(0, config.max_positions) + flops.span(0, rest)


def saturation_of(config: ModelConfig, max_step_tokens: int, slowdown: float = 1.0) -> int:
    """Return the FLOPs that fill a worker: its largest step, times ``slowdown`` by transfers."""
    return saturation_flops(step_flops(config, max_step_tokens), slowdown)


def _attention(config: ModelConfig, layer: int) -> AttentionFlops:
    how = config.attention
    if isinstance(how, LatentAttention):
        return latent(
            config.hidden_size,
            how.num_heads,
            how.q_lora_rank,
            how.kv_lora_rank,
            how.qk_nope_head_dim,
            how.qk_rope_head_dim,
            how.v_head_dim,
        )
    return grouped_query(
        config.hidden_size, how.num_heads, how.num_kv_heads, how.head_dim, how.window_of(layer)
    )
