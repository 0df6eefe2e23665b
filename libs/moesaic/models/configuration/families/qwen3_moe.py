"""Qwen3-MoE (arXiv:2505.09388)."""

from moesaic.models.configuration.family import COMMON, Family, FamilyParts, usual_names
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import grouped_query, mixture, qwen_layers


def _read(fields: Fields) -> FamilyParts:
    bias = fields.flag("attention_bias")
    windowed = fields.flag("use_sliding_window") and fields.has("sliding_window")
    attention = grouped_query(
        fields,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        sliding_window=fields.size("sliding_window") if windowed else None,
    )
    moe = mixture(fields, "num_experts", norm_topk_prob=fields.flag("norm_topk_prob"))
    return FamilyParts(attention, moe, qwen_layers(fields), fields.size("intermediate_size"))


FAMILY = Family(
    model_types=("qwen3_moe",),
    read=_read,
    layouts=usual_names(),
    spellings={"num_experts": "num_local_experts"},
    defaults=COMMON
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
)
