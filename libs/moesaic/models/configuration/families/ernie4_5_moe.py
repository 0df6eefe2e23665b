"""ERNIE 4.5, its text models with experts (Baidu's technical report of 2025)."""

from dataclasses import replace

from moesaic.models.configuration.family import (
    COMMON,
    ROTARY_BUFFERS,
    Family,
    FamilyParts,
    usual_names,
)
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import all_layers, grouped_query, mixture


def _read(fields: Fields) -> FamilyParts:
    if fields.flag("use_bias"):
        raise fields.error("use_bias", "biases in the MLPs and the head are not supported")
    shared = fields.size("moe_num_shared_experts", least=0) * fields.size("moe_intermediate_size")
    moe = mixture(
        fields,
        "moe_num_experts",
        top_k="moe_k",
        norm_topk_prob=True,
        norm_least=fields.number("moe_norm_min"),
        correction_bias=True,
        float32_gate=True,
        shared_expert_size=shared,
    )
    attention = grouped_query(fields, null_kv_heads=True)
    dense_size = fields.size("intermediate_size")
    return FamilyParts(attention, moe, _sparse_layers(fields), dense_size, interleaved=True)


def _sparse_layers(fields: Fields) -> tuple[int, ...]:
    every, layers = fields.size("moe_layer_interval"), all_layers(fields)
    first, last = (fields.size(f"moe_layer_{name}_index", least=-1) for name in ("start", "end"))
    last = layers[-1] if last == -1 else last
    return tuple(i for i in layers if first <= i <= last and (i + 1) % every == 0)


_EACH, _TOGETHER = usual_names(correction="mlp.moe_statics.e_score_correction_bias")

FAMILY = Family(
    model_types=("ernie4_5_moe",),
    read=_read,
    layouts=(
        replace(_EACH, correction_axes=(1,)),
        replace(
            _TOGETHER,
            correction="mlp.gate.moe_statics.e_score_correction_bias",
            correction_axes=(1,),
        ),
    ),
    unused=(ROTARY_BUFFERS, r"model\.mtp_.*"),
    spellings={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    defaults=COMMON
    | {
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
        "eos_token_id": 2,
    },
)
