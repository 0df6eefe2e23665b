"""OLMoE (arXiv:2409.02060)."""

from moesaic.models.configuration.family import COMMON, Family, FamilyParts, usual_names
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import all_layers, grouped_query, mixture


def _read(fields: Fields) -> FamilyParts:
    bias = fields.flag("attention_bias")
    attention = grouped_query(
        fields,
        null_kv_heads=True,
        qk_norm=True,
        wide_qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        clip=fields.number("clip_qkv") if fields.has("clip_qkv") else None,
    )
    normalised = fields.flag("norm_topk_prob")
    moe = mixture(fields, "num_experts", "intermediate_size", norm_topk_prob=normalised)
    return FamilyParts(attention, moe, all_layers(fields))


FAMILY = Family(
    model_types=("olmoe",),
    read=_read,
    layouts=usual_names(),
    spellings={"num_experts": "num_local_experts"},
    defaults=COMMON
    | {
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": None,  # as many as attention heads
        "head_dim": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "eos_token_id": 50279,
    },
)
