"""The configurations that parity with transformers is checked on: tiny models, every option of every family."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.parity import windows

VOCAB_SIZE = 96

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # small weights would make all logits alike and any answer right
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}


@dataclass(frozen=True)
class ParityCase:
    """One configuration of a family's class in transformers.

    ``options`` differ from the family's base. ``file`` changes fields of the saved file; ``...`` leaves a field out.
    """

    family: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    file: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


CLASSES = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM"),
    "granitemoeshared": ("GraniteMoeSharedConfig", "GraniteMoeSharedForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_DEEPSEEK: dict[str, Any] = {
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_GRANITE: dict[str, Any] = {
    "intermediate_size": 40,
    "num_local_experts": 6,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
BASES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 40, "num_local_experts": 6},
    "qwen2_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
        "num_experts": 8,
    },
    "qwen3_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "head_dim": 16,
    },
    "deepseek_v2": _DEEPSEEK | _LATENT,
    "deepseek_v3": _DEEPSEEK | _LATENT | {"n_group": 4, "topk_group": 2},
    "glm4_moe": _DEEPSEEK | {"head_dim": 16, "rope_parameters": {"rope_theta": 1e4}},
    "olmoe": {"intermediate_size": 40, "num_experts": 8},
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE | {"shared_intermediate_size": 56},
    "ernie4_5_moe": {
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "moe_k": 3,
        "moe_num_experts": 8,
        "tie_word_embeddings": False,
    },
    "gpt_oss": windows.GPT_OSS,
    "minimax_m2": {
        "intermediate_size": 40,
        "num_local_experts": 8,
        "head_dim": 16,
        "rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5},
    },
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = [
    ParityCase("mixtral", "base"),
    ParityCase(
        "mixtral",
        "tied embeddings, one key-value head",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    ParityCase("mixtral", "wide heads, no grouping", {"head_dim": 20, "num_key_value_heads": 4}),
    ParityCase("mixtral", "sliding window", {"sliding_window": 11}),
    ParityCase(
        "mixtral",
        "left out of the file: rms_norm_eps, rotation",
        file={"rms_norm_eps": ..., "rope_parameters": ..., "tie_word_embeddings": ...},
    ),
    ParityCase("mixtral", "top 1 of 3", {"num_local_experts": 3, "num_experts_per_tok": 1}),
    ParityCase("qwen2_moe", "base"),
    ParityCase(
        "qwen2_moe",
        "normalised, no bias, tied",
        {"norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    ParityCase(
        "qwen2_moe", "dense layers named", {"mlp_only_layers": [0], "num_experts_per_tok": 4}
    ),
    ParityCase(
        "qwen2_moe",
        "every second layer sparse",
        {"decoder_sparse_step": 2, "num_key_value_heads": 4},
    ),
    ParityCase("qwen3_moe", "base"),
    ParityCase(
        "qwen3_moe",
        "normalised, tied",
        {"norm_topk_prob": True, "tie_word_embeddings": True, "num_experts_per_tok": 4},
    ),
    ParityCase(
        "qwen3_moe",
        "biased, dense mix",
        {"attention_bias": True, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    ParityCase("qwen3_moe", "yarn", {"rope_parameters": _YARN}),
    ParityCase(
        "qwen3_moe",
        "yarn as older files spell it",
        {"rope_parameters": _YARN},
        {
            "rope_parameters": ...,
            "rope_theta": _YARN["rope_theta"],
            "rope_scaling": {
                "type": "yarn",
                **{k: v for k, v in _YARN.items() if not k.startswith("rope_")},
            },
        },
    ),
    ParityCase("qwen3_moe", "sliding window", {"use_sliding_window": True, "sliding_window": 9}),
    ParityCase("deepseek_v2", "base"),
    ParityCase(
        "deepseek_v2",
        "query compression, all sparse",
        {"q_lora_rank": 16, "first_k_dense_replace": 0},
    ),
    ParityCase("deepseek_v2", "biased", {"q_lora_rank": 16, "attention_bias": True}),
    ParityCase("deepseek_v2", "biased, no query compression", {"attention_bias": True}),
    ParityCase(
        "deepseek_v2",
        "yarn with mscale",
        {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.1}},
    ),
    ParityCase(
        "deepseek_v2",
        "left out of the file: n_shared_experts, gate",
        file=dict.fromkeys(("n_shared_experts", "topk_method", "routed_scaling_factor"), ...),
    ),
    ParityCase("deepseek_v2", "yarn without mscale", {"rope_parameters": _YARN}),
    ParityCase(
        "deepseek_v2",
        "group-limited, scaled",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 3,
        },
    ),
    ParityCase(
        "deepseek_v2",
        "greedy, scaled, wide values",
        {"routed_scaling_factor": 1.7, "v_head_dim": 24, "n_shared_experts": 1},
    ),
    ParityCase("qwen3_moe", "slowed as Llama 3.1", {"rope_parameters": _LLAMA3}),
    ParityCase(
        "qwen3_moe",
        "slowed linearly",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    ParityCase(
        "qwen3_moe",
        "dynamic, within its context",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    ParityCase("deepseek_v3", "base", {"num_experts_per_tok": 3}),
    ParityCase(
        "deepseek_v3",
        "as Kimi-K2: one group, query compression",
        {"q_lora_rank": 16, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
        {"model_type": "kimi_k2"},
    ),
    ParityCase(
        "deepseek_v3",
        "yarn with mscale, biased, halves",
        {
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "attention_bias": True,
            "rope_interleave": False,
        },
    ),
    ParityCase(
        "deepseek_v3",
        "not normalised, all sparse, tied",
        {"norm_topk_prob": False, "first_k_dense_replace": 0, "tie_word_embeddings": True},
    ),
    ParityCase("glm4_moe", "base"),
    ParityCase(
        "glm4_moe",
        "biased, norms of heads, scaled",
        {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
    ),
    ParityCase(
        "glm4_moe",
        "groups, a quarter rotated, as older files spell it",
        {
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
        {"rope_parameters": ..., "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
    ParityCase(
        "glm4_moe",
        "not normalised, two dense layers, yarn",
        {
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "rope_parameters": {**_YARN, "partial_rotary_factor": 0.5},
        },
    ),
    ParityCase("olmoe", "base"),
    ParityCase(
        "olmoe",
        "clipped, normalised, biased, no grouping",
        {
            "clip_qkv": 0.6,
            "norm_topk_prob": True,
            "attention_bias": True,
            "num_key_value_heads": 4,
        },
    ),
    ParityCase("olmoe", "tied, top 4", {"tie_word_embeddings": True, "num_experts_per_tok": 4}),
    ParityCase("granitemoe", "base"),
    ParityCase("granitemoe", "biased, tied", {"attention_bias": True, "tie_word_embeddings": True}),
    ParityCase("granitemoeshared", "base"),
    ParityCase("granitemoeshared", "nothing shared", {"shared_intermediate_size": 0}),
    ParityCase("ernie4_5_moe", "base"),
    ParityCase(
        "ernie4_5_moe",
        "tied, every second layer up to the second, nothing shared",
        {
            "tie_word_embeddings": True,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 1,
            "moe_num_shared_experts": 0,
        },
    ),
    ParityCase(
        "ernie4_5_moe",
        "sums bounded, all sparse",
        {"moe_norm_min": 0.7, "moe_layer_start_index": 0},
    ),
    ParityCase("minimax_m2", "base"),
    ParityCase(
        "minimax_m2",
        "as its file spells it, top 4",
        {"num_experts_per_tok": 4},
        {"rope_parameters": ..., "rope_theta": 5e6, "rotary_dim": 8},
    ),
    ParityCase(
        "minimax_m2",
        "whole heads, tied",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e4}},
    ),
    *(ParityCase(*each) for each in windows.CASES),
]
