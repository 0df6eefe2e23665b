"""DeepSeek-V3 and -R1 (arXiv:2412.19437), and Kimi-K2 (arXiv:2507.20534), whose text model is one."""

from moesaic.models.configuration.family import COMMON, Family, FamilyParts, usual_names
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.parts import corrected_mixture, latent, layers_behind_dense


def _read(fields: Fields) -> FamilyParts:
    return FamilyParts(
        latent(fields),
        corrected_mixture(fields),
        layers_behind_dense(fields),
        fields.size("intermediate_size"),
        interleaved=fields.flag("rope_interleave"),
    )


FAMILY = Family(
    model_types=("deepseek_v3", "kimi_k2"),
    read=_read,
    layouts=usual_names(),
    spellings={"n_routed_experts": "num_local_experts"},
    defaults=COMMON
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": None,  # as many as attention heads
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "q_lora_rank": 1536,  # None: queries come from one full projection
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "eos_token_id": 1,
    },
)
