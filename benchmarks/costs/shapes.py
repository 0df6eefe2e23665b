"""Shapes of published models, and checkpoints of a few of their layers with random weights and no routed experts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from moesaic.models.configuration.architecture import ModelConfig
from moesaic.models.configuration.config import load_config

VOCAB = 1024  # of the checkpoint: the head is measured by itself
DENSE_STD = 0.02


@dataclass(frozen=True)
class MeasuredShape:
    """One model.

    Attributes:
        name: for people.
        num_layers: decoder layers of the whole model.
        vocab_size: of the whole model.
        settings: of ``config.json``.
    """

    name: str
    num_layers: int
    vocab_size: int
    settings: dict[str, Any]


_QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_act": "silu",
    "intermediate_size": 6144,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN3_30B = MeasuredShape(
    "qwen3-30b-a3b",
    48,
    151936,
    {**_QWEN, "hidden_size": 2048, "num_attention_heads": 32, "moe_intermediate_size": 768},
)
QWEN3_235B = MeasuredShape(
    "qwen3-235b-a22b",
    94,
    151936,
    {**_QWEN, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536},
)
DEEPSEEK_V2 = MeasuredShape(
    "deepseek-v2",
    60,
    102400,
    {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 5120,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "routed_scaling_factor": 16.0,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1536,
        "intermediate_size": 12288,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    },
)


def write_layers(shape: MeasuredShape, directory: Path, num_layers: int) -> ModelConfig:
    """Write ``num_layers`` layers into ``directory``: all weights but those of routed experts and their gates.

    Returns:
        Their configuration.
    """
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    settings = {**shape.settings, **ends, "num_hidden_layers": num_layers, "vocab_size": VOCAB}
    (directory / "config.json").write_bytes(msgspec.json.encode(settings))
    config = load_config(directory)
    save_file(_tensors(settings, num_layers), directory / "model.safetensors")
    return config


def _tensors(settings: dict[str, Any], num_layers: int) -> dict[str, torch.Tensor]:
    hidden = settings["hidden_size"]
    random = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).mul_(DENSE_STD).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": made(VOCAB, hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(num_layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        shapes = _latent(settings) if "kv_lora_rank" in settings else _grouped(settings)
        for name, (rows, columns) in shapes.items():
            made_one = made(rows, columns) if columns else torch.ones(rows, dtype=torch.bfloat16)
            tensors[f"{at}self_attn.{name}.weight"] = made_one
        if shared := settings.get("n_shared_experts"):
            size = shared * settings["moe_intermediate_size"]
            for name, sizes in (
                ("gate_proj", (size, hidden)),
                ("up_proj", (size, hidden)),
                ("down_proj", (hidden, size)),
            ):
                tensors[f"{at}mlp.shared_experts.{name}.weight"] = made(*sizes)
    return tensors


def _grouped(settings: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, head = settings["hidden_size"], settings["head_dim"]
    queries, keys = settings["num_attention_heads"] * head, settings["num_key_value_heads"] * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "q_norm": (head, 0),
        "k_norm": (head, 0),
    }


def _latent(settings: dict[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    nope, rope = settings["qk_nope_head_dim"], settings["qk_rope_head_dim"]
    queries, latent = settings["q_lora_rank"], settings["kv_lora_rank"]
    values = settings["v_head_dim"]
    return {
        "q_a_proj": (queries, hidden),
        "q_a_layernorm": (queries, 0),
        "q_b_proj": (heads * (nope + rope), queries),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent, 0),
        "kv_b_proj": (heads * (nope + values), latent),
        "o_proj": (hidden, heads * values),
    }
