"""Published models: their configurations are taken, and have as many parameters as is said of them."""

import json
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.kernels.held_bytes import WeightForm
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.sizes import Numbers, numbers_for, weight_bytes

YARN = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
    "rope_theta": 10000,
    "rope_scaling": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
    "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64,
    "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0,
    "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "routed_scaling_factor": 1.0, "q_lora_rank": None,
    "rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax",
}  # fmt: skip
GLM_4_5_AIR: dict[str, Any] = {
    "model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "partial_rotary_factor": 0.5, "intermediate_size": 10944,
    "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "norm_topk_prob": True,
    "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_qk_norm": False, "vocab_size": 151552, "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip
GLM_4_5 = GLM_4_5_AIR | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
    "num_hidden_layers": 92, "use_qk_norm": True,
}  # fmt: skip
OLMOE: dict[str, Any] = {
    "model_type": "olmoe", "attention_bias": False, "clip_qkv": None, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
    "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 16, "num_key_value_heads": 16, "rope_scaling": None, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 50304,
}  # fmt: skip
GRANITE_3B: dict[str, Any] = {
    "model_type": "granitemoe", "attention_bias": False, "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 1536,
    "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072,
    "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 40, "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 49155,
}  # fmt: skip
ERNIE_21B: dict[str, Any] = {
    "model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 2560,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "num_attention_heads": 20,
    "num_key_value_heads": 4, "num_hidden_layers": 28, "rms_norm_eps": 1e-05, "rope_theta": 500000,
    "vocab_size": 103424, "tie_word_embeddings": True, "use_bias": False, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 1536,
    "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_k": 6, "moe_layer_interval": 1,
    "moe_use_aux_free": True, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "model_type": "minimax_m2", "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
    "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "tie_word_embeddings": False, "use_qk_norm": True,
    "use_routing_bias": True, "vocab_size": 200064, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "rope_theta": 1000000.0,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {  # without its quantization_config
    "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
                     "original_max_position_embeddings": 4096, "truncate": False},
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
GPT_OSS_120B = GPT_OSS_20B | {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
PUBLISHED = {
    "DeepSeek-V3": (DEEPSEEK_V3, 671e9),
    "Kimi-K2": (KIMI_K2, 1.026e12),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15.7e9),
    "GLM-4.5-Air": (GLM_4_5_AIR, 106e9),
    "GLM-4.5": (GLM_4_5, 355e9),
    "OLMoE-1B-7B": (OLMOE, 6.92e9),
    "Granite-3.1-3B-A800M": (GRANITE_3B, 3.3e9),
    "ERNIE-4.5-21B-A3B": (ERNIE_21B, 21.8e9),
    "MiniMax-M2": (MINIMAX_M2, 229e9),
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5e9),
    "Qwen3-235B-A22B": (QWEN3_235B, 235e9),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46.7e9),
    "gpt-oss-20b": (GPT_OSS_20B, 20.9e9),
    "gpt-oss-120b": (GPT_OSS_120B, 116.8e9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_is_said(tmp_path: Path, name: str) -> None:
    fields, published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))

    config = load_config(tmp_path)

    num_bytes = bytes_of(config, Numbers("float32", on_cpu=False))
    assert num_bytes / 4 == pytest.approx(published, rel=0.01)


def bytes_of(config: ModelConfig, numbers: Numbers) -> int:
    """Bytes of all weights."""
    *parts, expert = astuple(weight_bytes(config, numbers))
    return sum(parts) + len(config.moe_layers) * config.moe.num_experts * expert


@pytest.mark.parametrize(("name", "most_gib"), [("gpt-oss-20b", 14), ("gpt-oss-120b", 65)])
def test_a_gpu_holds_the_published_codes(tmp_path: Path, name: str, most_gib: int) -> None:
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    fields = PUBLISHED[name][0] | {"quantization_config": quantised}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config(tmp_path)
    on_gpu: Any = SimpleNamespace(dtype="bfloat16", quantization="none", device="cuda")

    numbers = numbers_for(on_gpu, config)

    assert numbers.codes == WeightForm("int4", 32, levels=True)
    assert 0.9 * most_gib < bytes_of(config, numbers) / 2**30 < most_gib
