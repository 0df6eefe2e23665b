"""Configurations whose windows differ by layer, and gpt-oss, which has such: arguments of ``ParityCase``."""

from typing import Any

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
GPT_OSS: dict[str, Any] = {
    "intermediate_size": 24,
    "num_local_experts": 6,
    "head_dim": 16,
    "sliding_window": 9,
    "swiglu_limit": 1.5,  # so that clamping counts with small weights
}
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "qwen2_moe",
        "windows by default",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
            "num_hidden_layers": 4,
        },
        {"layer_types": ...},
    ),
    (
        "qwen2_moe",
        "windows by layer",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
        {},
    ),
    ("gpt_oss", "base", {}, {}),
    (
        "gpt_oss",
        "hidden twice as wide as within, wide window, no biases in attention",
        {
            "hidden_size": 40,
            "intermediate_size": 20,
            "head_dim": 12,
            "sliding_window": 33,
            "attention_bias": False,
            "num_experts_per_tok": 3,
            "swiglu_alpha": 1.1,
        },
        {},
    ),
    (
        "gpt_oss",
        "yarn as older files spell it, full and sliding layers in another order",
        {
            "rope_parameters": _YARN,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
        {
            "rope_parameters": ...,
            "rope_theta": _YARN["rope_theta"],
            "rope_scaling": {k: v for k, v in _YARN.items() if k != "rope_theta"},
        },
    ),
    (
        "gpt_oss",
        "left out of the file: rotation, layers, activation",
        {},
        dict.fromkeys(("rope_parameters", "layer_types", "swiglu_alpha", "attention_bias"), ...),
    ),
]
