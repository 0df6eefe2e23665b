"""Granite-MoE 3.0 and 3.1, with shared experts or without; PowerMoE (arXiv:2408.13359)."""

from moesaic.models.configuration.family import (
    COMMON,
    Family,
    FamilyParts,
    SparseNames,
    mlp_names,
    together_under,
)
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import all_layers, grouped_query, mixture


def _read(fields: Fields) -> FamilyParts:
    bias = fields.flag("attention_bias")
    attention = grouped_query(
        fields,
        null_kv_heads=True,
        qkv_bias=bias,
        output_bias=bias,
        scale=fields.number("attention_multiplier"),
    )
    has_shared = fields.choice("model_type", FAMILY.model_types) == "granitemoeshared"
    moe = mixture(
        fields,
        "num_local_experts",
        "intermediate_size",
        norm_topk_prob=True,  # softmax over the chosen logits
        shared_expert_size=fields.size("shared_intermediate_size", least=0) if has_shared else 0,
    )
    return FamilyParts(
        attention,
        moe,
        all_layers(fields),
        embedding_multiplier=fields.number("embedding_multiplier"),
        residual_multiplier=fields.number("residual_multiplier"),
        logits_scaling=fields.number("logits_scaling"),
    )


_LINEARS = ("input_linear", "output_linear")
_SHARED = mlp_names("shared_mlp.", _LINEARS)

FAMILY = Family(
    model_types=("granitemoe", "granitemoeshared"),
    read=_read,
    layouts=(
        SparseNames(
            "block_sparse_moe.router.layer.weight",
            mlp_names("block_sparse_moe.", _LINEARS),
            shared=_SHARED,
        ),
        SparseNames(
            "block_sparse_moe.router.weight",
            together_under("block_sparse_moe."),
            shared=_SHARED,
        ),
    ),
    defaults=COMMON
    | {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # as many as attention heads
        "head_dim": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
        "eos_token_id": 2,
    },
)
