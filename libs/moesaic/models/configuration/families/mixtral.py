"""Mixtral (arXiv:2401.04088)."""

from moesaic.models.configuration.family import COMMON, Family, FamilyParts, mixtral_names
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import all_layers, grouped_query, mixture


def _read(fields: Fields) -> FamilyParts:
    window = fields.size("sliding_window") if fields.has("sliding_window") else None
    # Softmax over the chosen logits alone equals normalised shares of a softmax over all.
    moe = mixture(fields, "num_local_experts", "intermediate_size", norm_topk_prob=True)
    return FamilyParts(grouped_query(fields, sliding_window=window), moe, all_layers(fields))


FAMILY = Family(
    model_types=("mixtral",),
    read=_read,
    layouts=mixtral_names(),
    spellings={"num_local_experts": "num_experts"},
    defaults=COMMON
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "eos_token_id": 2,
    },
)
