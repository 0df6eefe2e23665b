"""The spellings of ``config.json``, family by family."""

from collections.abc import Callable
from typing import cast

from moesaic.models.configuration.architecture import (
    Dtype,
    Family,
    GroupedQueryAttention,
    LatentAttention,
    ModelConfig,
    MoE,
    TopkMethod,
)
from moesaic.models.configuration.family_defaults import DEFAULTS, OTHER_SPELLINGS
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.rope_fields import read_rope

_Parts = tuple[GroupedQueryAttention | LatentAttention, MoE, tuple[int, ...], int]


def read_family(fields: Fields, generation: Fields, config_digest: str) -> ModelConfig:
    """Build the family-neutral configuration from the fields of ``config.json``, and from the end
    tokens in ``generation_config.json``.

    Raises:
        CheckpointError: an unknown family, or a field that is missing, invalid, not supported, or
            contradicts another one.
    """
    family = cast(Family, fields.choice("model_type", tuple(_READERS)))
    fields = fields.filled(DEFAULTS[family], OTHER_SPELLINGS[family])
    fields.choice("hidden_act", ("silu",))
    _refuse_unsupported(fields)
    attention, moe, moe_layers, dense_size = _READERS[family](fields)
    if moe.top_k > moe.num_experts:
        raise fields.error(
            "num_experts_per_tok", f"expected at most {moe.num_experts}, got {moe.top_k}"
        )
    if attention.rotary_dim % 2:
        raise fields.error(
            "head_dim", f"rotary embedding needs an even width, got {attention.rotary_dim}"
        )
    ends = generation if generation.has("eos_token_id") else fields
    return ModelConfig(
        family=family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=fields.size("hidden_size"),
        num_layers=fields.size("num_hidden_layers"),
        max_positions=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention=attention,
        rope=read_rope(fields, latent=isinstance(attention, LatentAttention)),
        moe=moe,
        moe_layers=moe_layers,
        dense_size=dense_size,
        eos_token_ids=ends.sizes("eos_token_id"),
        dtype=_read_dtype(fields),
        config_digest=config_digest,
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("quantization_config"):
        raise fields.error(
            "quantization_config", "quantised weights are not supported; use float32 or bfloat16"
        )
    if fields.has("per_layer_config"):
        raise fields.error("per_layer_config", "layers of several shapes are not supported")


def _read_mixtral(fields: Fields) -> _Parts:
    attention = _grouped_query_attention(
        fields, window=fields.size("sliding_window") if fields.has("sliding_window") else None
    )
    moe = _moe(
        fields,
        fields.size("num_local_experts"),
        fields.size("intermediate_size"),
        norm_topk_prob=True,
    )
    return attention, moe, tuple(range(fields.size("num_hidden_layers"))), 0


def _read_qwen2_moe(fields: Fields) -> _Parts:
    if fields.flag("use_sliding_window"):
        raise fields.error(
            "use_sliding_window", "windows that differ between layers are not supported"
        )
    if fields.has("layer_types") and not fields.all_are("layer_types", "full_attention"):
        raise fields.error("layer_types", "expected full_attention in all layers")
    attention = _grouped_query_attention(fields, qkv_bias=fields.flag("qkv_bias"))
    moe = _moe(
        fields,
        fields.size("num_experts"),
        fields.size("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        shared_expert_size=fields.size("shared_expert_intermediate_size"),
        shared_expert_gated=True,
    )
    return attention, moe, _qwen_moe_layers(fields), fields.size("intermediate_size")


def _read_qwen3_moe(fields: Fields) -> _Parts:
    bias = fields.flag("attention_bias")
    windowed = fields.flag("use_sliding_window") and fields.has("sliding_window")
    window = fields.size("sliding_window") if windowed else None
    attention = _grouped_query_attention(
        fields, qk_norm=True, qkv_bias=bias, output_bias=bias, window=window
    )
    moe = _moe(
        fields,
        fields.size("num_experts"),
        fields.size("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
    )
    return attention, moe, _qwen_moe_layers(fields), fields.size("intermediate_size")


def _read_deepseek_v2(fields: Fields) -> _Parts:
    _refuse_in_deepseek_v2(fields)
    attention = LatentAttention(
        num_heads=fields.size("num_attention_heads"),
        q_lora_rank=fields.size("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=fields.size("qk_nope_head_dim"),
        qk_rope_head_dim=fields.size("qk_rope_head_dim"),
        v_head_dim=fields.size("v_head_dim"),
        bias=fields.flag("attention_bias"),
    )
    expert_size = fields.size("moe_intermediate_size")
    moe = _moe(
        fields,
        fields.size("n_routed_experts"),
        expert_size,
        # transformers, the reference here, ignores norm_topk_prob for this family; every released
        # checkpoint says false.
        norm_topk_prob=False,
        shared_expert_size=fields.size("n_shared_experts", least=0) * expert_size,
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        groups=_expert_groups(fields),
        float32_gate=True,
    )
    first = fields.size("first_k_dense_replace", least=0)
    moe_layers = tuple(range(first, fields.size("num_hidden_layers")))
    return attention, moe, moe_layers, fields.size("intermediate_size")


def _refuse_in_deepseek_v2(fields: Fields) -> None:
    """Raise ``CheckpointError`` for options that would make another model of it."""
    if fields.flag("mlp_bias"):
        raise fields.error("mlp_bias", "biases in the MLPs are not supported")
    if fields.has("moe_layer_freq") and fields.size("moe_layer_freq") != 1:
        raise fields.error("moe_layer_freq", "expected 1: every layer after the first dense ones")
    if fields.has("scoring_func"):
        fields.choice("scoring_func", ("softmax",))
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    heads = fields.size("num_attention_heads")
    for name, expected, why in (  # transformers writes them beside what they are made of
        ("head_dim", rope, "qk_rope_head_dim"),
        ("qk_head_dim", nope + rope, "qk_nope_head_dim and qk_rope_head_dim together"),
        ("num_key_value_heads", heads, "num_attention_heads"),
    ):
        if fields.has(name) and fields.size(name) != expected:
            raise fields.error(name, f"expected {expected}, as {why} say, got {fields.size(name)}")


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
    num_kv_heads = fields.size("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise fields.error(
            "num_key_value_heads", f"expected a divisor of {num_heads}, got {num_kv_heads}"
        )
    default_dim = fields.size("hidden_size") // num_heads
    head_dim = fields.size("head_dim") if fields.has("head_dim") else default_dim
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


def _qwen_moe_layers(fields: Fields) -> tuple[int, ...]:
    every = fields.size("decoder_sparse_step")
    dense = fields.sizes("mlp_only_layers")
    layers = range(fields.size("num_hidden_layers"))
    return tuple(i for i in layers if i not in dense and (i + 1) % every == 0)


def _expert_groups(fields: Fields) -> tuple[str, int, int]:
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"))
    if method == "greedy":
        return method, 1, 1
    n_group, topk_group = fields.size("n_group"), fields.size("topk_group")
    if topk_group > n_group:
        raise fields.error("topk_group", f"expected at most {n_group}, got {topk_group}")
    return method, n_group, topk_group


def _read_dtype(fields: Fields) -> Dtype:
    if not fields.has("dtype"):
        return "float32"
    return cast(Dtype, fields.choice("dtype", ("float32", "bfloat16", "float16")))
