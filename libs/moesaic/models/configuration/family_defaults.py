"""Defaults for fields that a ``config.json`` leaves out, as each family's class in transformers (5.23) has them.

A field that is not here is needed in every file, or is optional. ``None`` is a value of its own: a class that takes
it means something else by it than by leaving the field out. ``tests/models/configuration/test_defaults.py`` compares
every entry with the classes.
"""

from collections.abc import Mapping
from typing import Any

from moesaic.models.configuration.architecture import Family

_ALL: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "per_layer_config": None,
}

DEFAULTS: Mapping[Family, Mapping[str, Any]] = {
    "mixtral": _ALL
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
    "qwen2_moe": _ALL
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
    "qwen3_moe": _ALL
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
    "deepseek_v2": _ALL
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
}

# Another name for the same field, which the family's class takes too.
OTHER_SPELLINGS: Mapping[Family, Mapping[str, str]] = {
    "mixtral": {"num_local_experts": "num_experts", "dtype": "torch_dtype"},
    "qwen2_moe": {"dtype": "torch_dtype"},
    "qwen3_moe": {"num_experts": "num_local_experts", "dtype": "torch_dtype"},
    "deepseek_v2": {"n_routed_experts": "num_experts", "dtype": "torch_dtype"},
}
