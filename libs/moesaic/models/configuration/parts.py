"""Readers of the parts that families share: grouped-query attention, latent attention, experts."""

from collections.abc import Sequence
from typing import Any, cast

from moesaic.models.configuration.architecture import (
    GroupedQueryAttention,
    LatentAttention,
    MoE,
    TopkMethod,
)
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.rope_fields import rotated_width

# Far beyond published models; all layers, and the experts of each, are listed by name when files are checked.
_MOST_LAYERS, _MOST_EXPERTS = 1024, 8192


def grouped_query(
    fields: Fields, *, partly_rotated: bool = False, null_kv_heads: bool = False, **options: Any
) -> GroupedQueryAttention:
    """Read grouped-query attention.

    Args:
        fields: fields of the file.
        partly_rotated: heads may be rotated in part.
        null_kv_heads: ``num_key_value_heads`` may be null: as many as ``num_attention_heads``.
        options: further fields of ``GroupedQueryAttention``.
    """
    num_heads = fields.size("num_attention_heads")
    as_many = null_kv_heads and not fields.has("num_key_value_heads")
    num_kv_heads = num_heads if as_many else fields.size("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"expected a divisor of {num_heads}, got {num_kv_heads}"
        )
    head_dim = fields.size("head_dim") if fields.has("head_dim") else _head_dim(fields, num_heads)
    rotated = rotated_width(fields, head_dim, partly=partly_rotated)
    return GroupedQueryAttention(num_heads, num_kv_heads, head_dim, rotated_dim=rotated, **options)


def _head_dim(fields: Fields, num_heads: int) -> int:
    hidden_size = fields.size("hidden_size")
    if num_heads > hidden_size:
        raise fields.error(
            "num_attention_heads", f"expected at most hidden_size, {hidden_size}, got {num_heads}"
        )
    return hidden_size // num_heads


def full_layers(fields: Fields, windowed: Sequence[bool]) -> tuple[int, ...]:
    """Read the indices of the layers without a window from ``layer_types``; a file that has none means ``windowed``."""
    if fields.has("layer_types"):
        sliding = "sliding_attention"
        types = fields.choices("layer_types", (sliding, "full_attention"), "num_hidden_layers")
        windowed = [each == sliding for each in types]
    return tuple(layer for layer, is_windowed in enumerate(windowed) if not is_windowed)


def latent(fields: Fields) -> LatentAttention:
    """Read multi-head latent attention, in DeepSeek's spelling."""
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    heads = fields.size("num_attention_heads")
    rotated_width(fields, rope, partly=False)
    # Transformers writes them beside what they are made of.
    for name, expected, why in (
        ("head_dim", rope, "qk_rope_head_dim"),
        ("qk_head_dim", nope + rope, "qk_nope_head_dim and qk_rope_head_dim together"),
        ("num_key_value_heads", heads, "num_attention_heads"),
    ):
        if fields.has(name) and fields.size(name) != expected:
            raise fields.error(name, f"expected {expected}, as {why} say, got {fields.size(name)}")
    return LatentAttention(
        num_heads=heads,
        q_lora_rank=fields.size("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=fields.size("v_head_dim"),
        bias=fields.flag("attention_bias"),
    )


def mixture(
    fields: Fields,
    num_experts: str,
    expert_size: str = "moe_intermediate_size",
    *,
    top_k: str = "num_experts_per_tok",
    topk_method: TopkMethod = "greedy",
    **options: Any,
) -> MoE:
    """Read the experts.

    Args:
        fields: fields of the file.
        num_experts: name of the field with their number.
        expert_size: and of the one with their inner width.
        top_k: and with the number that a token chooses.
        topk_method: other than greedy: ``n_group`` and ``topk_group`` count.
        options: further fields of ``MoE``.
    """
    experts, chosen = fields.size(num_experts, most=_MOST_EXPERTS), fields.size(top_k)
    if chosen > experts:
        raise fields.error(top_k, f"expected at most {experts}, got {chosen}")
    n_group, topk_group = (1, 1) if topk_method == "greedy" else _groups(fields)
    if experts % n_group:
        raise fields.error("n_group", f"expected a divisor of {experts} experts, got {n_group}")
    if chosen > experts // n_group * topk_group:
        raise fields.error(
            top_k,
            f"{topk_group} of {n_group} groups hold fewer than {chosen} of {experts} experts",
        )
    return MoE(
        num_experts=experts,
        top_k=chosen,
        expert_size=fields.size(expert_size),
        topk_method=topk_method,
        n_group=n_group,
        topk_group=topk_group,
        **options,
    )


def corrected_mixture(fields: Fields) -> MoE:
    """Read experts that are chosen as in DeepSeek-V3, in its spelling."""
    require(fields, "scoring_func", "sigmoid")
    require(fields, "topk_method", "noaux_tc")
    shared = fields.size("n_shared_experts", least=0) * fields.size("moe_intermediate_size")
    return mixture(
        fields,
        "n_routed_experts",
        topk_method="noaux_tc",
        norm_topk_prob=fields.flag("norm_topk_prob"),
        norm_epsilon=1e-20,
        scoring_func="sigmoid",
        correction_bias=True,
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        shared_expert_size=shared,
        float32_gate=True,
    )


def _groups(fields: Fields) -> tuple[int, int]:
    n_group, topk_group = fields.size("n_group"), fields.size("topk_group")
    if topk_group > n_group:
        raise fields.error("topk_group", f"expected at most {n_group}, got {topk_group}")
    return n_group, topk_group


def all_layers(fields: Fields) -> tuple[int, ...]:
    """Return the indices of all layers."""
    return tuple(range(fields.size("num_hidden_layers", most=_MOST_LAYERS)))


def layers_behind_dense(fields: Fields) -> tuple[int, ...]:
    """Return the indices of the layers after the first dense ones, in DeepSeek's spelling."""
    first = fields.size("first_k_dense_replace", least=0)
    if fields.has("moe_layer_freq") and fields.size("moe_layer_freq") != 1:
        raise fields.error("moe_layer_freq", "expected 1: every layer after the first dense ones")
    return all_layers(fields)[first:]


def qwen_layers(fields: Fields) -> tuple[int, ...]:
    """Return the indices of the sparse layers, in Qwen's spelling."""
    every, dense = fields.size("decoder_sparse_step"), fields.sizes("mlp_only_layers")
    return tuple(i for i in all_layers(fields) if i not in dense and (i + 1) % every == 0)


def require(fields: Fields, name: str, *allowed: str) -> None:
    """Refuse a field that a file may leave out, but not give another value than the ``allowed``."""
    if fields.has(name):
        fields.choice(name, allowed)


def read_topk_method(fields: Fields, *allowed: TopkMethod) -> TopkMethod:
    """Read the way in which experts are chosen."""
    return cast("TopkMethod", fields.choice("topk_method", allowed))
