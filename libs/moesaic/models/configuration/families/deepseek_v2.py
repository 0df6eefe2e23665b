"""DeepSeek-V2 (arXiv:2405.04434)."""

from moesaic.models.configuration.family import COMMON, Family, FamilyParts, usual_names
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import (
    latent,
    layers_behind_dense,
    mixture,
    read_topk_method,
    require,
)


def _read(fields: Fields) -> FamilyParts:
    if fields.flag("mlp_bias"):
        raise fields.error("mlp_bias", "biases in the MLPs are not supported")
    require(fields, "scoring_func", "softmax")
    shared = fields.size("n_shared_experts", least=0) * fields.size("moe_intermediate_size")
    moe = mixture(
        fields,
        "n_routed_experts",
        topk_method=read_topk_method(fields, "greedy", "group_limited_greedy"),
        # transformers, the reference here, ignores norm_topk_prob for this family; every released
        # checkpoint says false.
        norm_topk_prob=False,
        shared_expert_size=shared,
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        float32_gate=True,
    )
    dense_size = fields.size("intermediate_size")
    return FamilyParts(
        latent(fields), moe, layers_behind_dense(fields), dense_size, interleaved=True
    )


FAMILY = Family(
    model_types=("deepseek_v2",),
    read=_read,
    layouts=usual_names(),
    spellings={"n_routed_experts": "num_experts"},
    defaults=COMMON
    | {
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,  # as many as attention heads
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "q_lora_rank": 1536,  # None: queries come from one full projection
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "eos_token_id": 2,
    },
)
