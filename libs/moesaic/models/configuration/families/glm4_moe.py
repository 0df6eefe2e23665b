"""GLM-4.5 and GLM-4.6 (arXiv:2508.06471)."""

from moesaic.models.configuration.family import COMMON, Family, FamilyParts, usual_names
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import corrected_mixture, grouped_query, layers_behind_dense


def _read(fields: Fields) -> FamilyParts:
    attention = grouped_query(
        fields,
        partly_rotated=True,
        qk_norm=fields.flag("use_qk_norm"),
        qkv_bias=fields.flag("attention_bias"),
    )
    layers, dense_size = layers_behind_dense(fields), fields.size("intermediate_size")
    return FamilyParts(attention, corrected_mixture(fields), layers, dense_size)


FAMILY = Family(
    model_types=("glm4_moe",),
    read=_read,
    layouts=usual_names(),
    spellings={"n_routed_experts": "num_local_experts"},
    defaults=COMMON
    | {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
)
