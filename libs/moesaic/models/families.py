"""How each family spells its ``config.json``."""

import math
from collections.abc import Callable
from typing import cast

from moesaic.models.architecture import (
    Dtype,
    Family,
    GroupedQueryAttention,
    LatentAttention,
    ModelConfig,
    MoE,
    Rope,
    TopkMethod,
    Yarn,
)
from moesaic.models.fields import Fields

_Parts = tuple[GroupedQueryAttention | LatentAttention, MoE, tuple[int, ...], int]


def read_family(fields: Fields, eos_token_ids: tuple[int, ...], digest: str) -> ModelConfig:
    """Build the family-neutral configuration from the fields of ``config.json``.

    Raises:
        CheckpointError: an unknown family, or a field that is missing, invalid or asks for what is
            not supported.
    """
    family = fields.choice("model_type", tuple(_READERS))
    fields.choice("hidden_act", ("silu",), "silu")
    if fields.has("quantization_config"):
        raise fields.error(
            "quantization_config", "quantised weights are not supported; use float32 or bfloat16"
        )
    attention, moe, moe_layers, dense_size = _READERS[family](fields)
    if moe.top_k > moe.num_experts:
        raise fields.error(
            "num_experts_per_tok", f"expected at most {moe.num_experts}, got {moe.top_k}"
        )
    if attention.rotary_dim % 2:
        raise fields.error(
            "head_dim", f"rotary embedding needs an even width, got {attention.rotary_dim}"
        )
    max_positions = fields.size("max_position_embeddings")
    return ModelConfig(
        family=cast(Family, family),
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        max_positions=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention=attention,
        rope=_read_rope(fields, max_positions, latent=isinstance(attention, LatentAttention)),
        moe=moe,
        moe_layers=moe_layers,
        dense_size=dense_size,
        eos_token_ids=eos_token_ids,
        dtype=_read_dtype(fields),
        digest=digest,
    )


def _read_mixtral(fields: Fields) -> _Parts:
    attention = _grouped_query_attention(
        fields, window=fields.size("sliding_window") if fields.has("sliding_window") else None
    )
    moe = _moe(
        fields,
        _num_experts(fields),
        fields.size("intermediate_size"),
        norm_topk_prob=True,
    )
    return attention, moe, tuple(range(fields.size("num_hidden_layers"))), 0


def _read_qwen2_moe(fields: Fields) -> _Parts:
    if fields.flag("use_sliding_window", False):
        raise fields.error(
            "use_sliding_window", "windows that differ between layers are not supported"
        )
    attention = _grouped_query_attention(fields, qkv_bias=fields.flag("qkv_bias", True))
    moe = _moe(
        fields,
        _num_experts(fields),
        fields.size("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
        shared_expert_size=fields.size("shared_expert_intermediate_size"),
        shared_expert_gated=True,
    )
    return attention, moe, _qwen_moe_layers(fields), fields.size("intermediate_size")


def _read_qwen3_moe(fields: Fields) -> _Parts:
    bias = fields.flag("attention_bias", False)
    window = fields.size("sliding_window") if fields.flag("use_sliding_window", False) else None
    attention = _grouped_query_attention(
        fields, qk_norm=True, qkv_bias=bias, output_bias=bias, window=window
    )
    moe = _moe(
        fields,
        _num_experts(fields),
        fields.size("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob", False),
    )
    return attention, moe, _qwen_moe_layers(fields), fields.size("intermediate_size")


def _read_deepseek_v2(fields: Fields) -> _Parts:
    if fields.flag("mlp_bias", False):
        raise fields.error("mlp_bias", "biases in the MLPs are not supported")
    attention = LatentAttention(
        num_heads=fields.size("num_attention_heads"),
        q_lora_rank=fields.size("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
        bias=fields.flag("attention_bias", False),
    )
    expert_size = fields.size("moe_intermediate_size")
    moe = _moe(
        fields,
        fields.size("n_routed_experts"),
        expert_size,
        # transformers, the reference here, ignores norm_topk_prob for this family; every released
        # checkpoint says false.
        norm_topk_prob=False,
        shared_expert_size=fields.size("n_shared_experts", 0, least=0) * expert_size,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        groups=_expert_groups(fields),
        float32_gate=True,
    )
    first = fields.size("first_k_dense_replace", 0, least=0)
    every = fields.size("moe_layer_freq", 1)
    moe_layers = tuple(i for i in range(first, fields.size("num_hidden_layers")) if i % every == 0)
    return attention, moe, moe_layers, fields.size("intermediate_size")


_READERS: dict[str, Callable[[Fields], _Parts]] = {
    "mixtral": _read_mixtral,
    "qwen2_moe": _read_qwen2_moe,
    "qwen3_moe": _read_qwen3_moe,
    "deepseek_v2": _read_deepseek_v2,
}


def _grouped_query_attention(
    fields: Fields,
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    output_bias: bool = False,
    window: int | None = None,
) -> GroupedQueryAttention:
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"expected a divisor of {num_heads}, got {num_kv_heads}"
        )
    head_dim = fields.size("head_dim", fields.size("hidden_size") // num_heads)
    return GroupedQueryAttention(
        num_heads, num_kv_heads, head_dim, qk_norm, qkv_bias, output_bias, window
    )


def _moe(
    fields: Fields,
    num_experts: int,
    expert_size: int,
    *,
    norm_topk_prob: bool,
    shared_expert_size: int = 0,
    shared_expert_gated: bool = False,
    routed_scaling_factor: float = 1.0,
    groups: tuple[str, int, int] = ("greedy", 1, 1),
    float32_gate: bool = False,
) -> MoE:
    topk_method, n_group, topk_group = groups
    if num_experts % n_group:
        raise fields.error("n_group", f"expected a divisor of {num_experts} experts, got {n_group}")
    top_k = fields.size("num_experts_per_tok")
    if top_k > num_experts // n_group * topk_group:
        raise fields.error(
            "num_experts_per_tok",
            f"{topk_group} of {n_group} groups hold fewer than {top_k} of {num_experts} experts",
        )
    return MoE(
        num_experts=num_experts,
        top_k=top_k,
        expert_size=expert_size,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
        topk_method=cast(TopkMethod, topk_method),
        n_group=n_group,
        topk_group=topk_group,
        float32_gate=float32_gate,
        shared_expert_size=shared_expert_size,
        shared_expert_gated=shared_expert_gated,
    )


def _num_experts(fields: Fields) -> int:
    # transformers has saved either name
    return fields.size("num_local_experts" if fields.has("num_local_experts") else "num_experts")


def _qwen_moe_layers(fields: Fields) -> tuple[int, ...]:
    every = fields.size("decoder_sparse_step", 1)
    dense = fields.sizes("mlp_only_layers")
    layers = range(fields.size("num_hidden_layers"))
    return tuple(i for i in layers if i not in dense and (i + 1) % every == 0)


def _expert_groups(fields: Fields) -> tuple[str, int, int]:
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    if method == "greedy":
        return method, 1, 1
    n_group, topk_group = fields.size("n_group"), fields.size("topk_group")
    if topk_group > n_group:
        raise fields.error("topk_group", f"expected at most {n_group}, got {topk_group}")
    return method, n_group, topk_group


def _read_rope(fields: Fields, max_positions: int, *, latent: bool) -> Rope:
    # New files have rope_parameters; older ones rope_theta beside a rope_scaling that may be null.
    scaling = fields.group("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    theta = (scaling if scaling.has("rope_theta") else fields).number("rope_theta")
    for place in (scaling, fields):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.error(
                "partial_rotary_factor", "heads that are rotated in part are not supported"
            )
    spelling = "type" if scaling.has("type") and not scaling.has("rope_type") else "rope_type"
    if scaling.choice(spelling, ("default", "yarn"), "default") == "default":
        return Rope(theta, None)
    return Rope(theta, _read_yarn(scaling, max_positions, latent=latent))


def _read_yarn(scaling: Fields, max_positions: int, *, latent: bool) -> Yarn:
    factor = scaling.number("factor")
    mscale = scaling.number("mscale", 0.0, zero=True)  # 0 is how a file says "none"
    all_dim = scaling.number("mscale_all_dim", 0.0, zero=True)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    inferred = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return Yarn(
        factor=factor,
        original_max_positions=scaling.size("original_max_position_embeddings", max_positions),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
        rotation_scale=scaling.number("attention_factor", inferred),
        softmax_scale=magnitude(all_dim) ** 2 if latent and all_dim else 1.0,
    )


def _read_dtype(fields: Fields) -> Dtype:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    return cast(Dtype, fields.choice(name, ("float32", "bfloat16"), "float32"))
