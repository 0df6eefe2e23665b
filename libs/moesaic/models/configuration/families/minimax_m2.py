"""MiniMax-M2 (its model card of 2025)."""

from moesaic.models.configuration.family import COMMON, Family, FamilyParts, mixtral_names
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import all_layers, grouped_query, mixture, require


def _read(fields: Fields) -> FamilyParts:
    require(fields, "scoring_func", "sigmoid")
    # Null would be another width.
    fields.size("head_dim")
    attention = grouped_query(fields, partly_rotated=True, qk_norm=True, wide_qk_norm=True)
    moe = mixture(
        fields,
        "num_local_experts",
        "intermediate_size",
        norm_topk_prob=True,
        scoring_func="sigmoid",
        correction_bias=True,
    )
    return FamilyParts(attention, moe, all_layers(fields))


FAMILY = Family(
    model_types=("minimax_m2",),
    read=_read,
    layouts=mixtral_names(correction="e_score_correction_bias"),
    spellings={"num_local_experts": "num_experts"},
    defaults=COMMON
    | {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "eos_token_id": 200020,
    },
)
