"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671)."""

from moesaic.models.configuration.family import COMMON, Family, FamilyParts, usual_names
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import (
    all_layers,
    full_layers,
    grouped_query,
    mixture,
    qwen_layers,
)


def _read(fields: Fields) -> FamilyParts:
    windowed, most = fields.flag("use_sliding_window"), fields.size("max_window_layers", least=0)
    full = full_layers(fields, [windowed and i < most and i % 2 == 0 for i in all_layers(fields)])
    if not windowed and full != all_layers(fields):
        raise fields.error("layer_types", "has windows, but use_sliding_window says false")
    moe = mixture(
        fields,
        "num_experts",
        norm_topk_prob=fields.flag("norm_topk_prob"),
        shared_expert_size=fields.size("shared_expert_intermediate_size", least=0),
        shared_expert_gated=True,
    )
    attention = grouped_query(
        fields,
        qkv_bias=fields.flag("qkv_bias"),
        sliding_window=fields.size("sliding_window") if windowed else None,
        full_layers=full if windowed else (),
    )
    return FamilyParts(attention, moe, qwen_layers(fields), fields.size("intermediate_size"))


FAMILY = Family(
    model_types=("qwen2_moe",),
    read=_read,
    layouts=usual_names(shared="mlp.shared_expert."),
    defaults=COMMON
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
    },
)
