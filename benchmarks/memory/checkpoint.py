"""A checkpoint of random weights in the shape of Qwen3-MoE, with its real vocabulary and number of experts."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

VOCAB = 151_936
STD = 0.02
SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": VOCAB - 1,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(directory: Path, **changes: Any) -> None:
    """Write configuration, tokenizer and bfloat16 weights into ``directory``; ``changes`` are of ``SHAPE``."""
    shape = {**SHAPE, **changes}
    (directory / "config.json").write_text(json.dumps(shape))
    _write_tokenizer(directory, shape["vocab_size"])
    random = torch.Generator().manual_seed(0)
    save_file(
        {
            name: (torch.randn(*size, generator=random) * STD).to(torch.bfloat16)
            if len(size) > 1
            else torch.ones(*size, dtype=torch.bfloat16)
            for name, size in _sizes(shape).items()
        },
        directory / "model.safetensors",
        {"format": "pt"},
    )


def _sizes(shape: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = shape["hidden_size"], shape["moe_intermediate_size"], shape["vocab_size"]
    dim = shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not shape["tie_word_embeddings"]:
        sizes["lm_head.weight"] = (vocab, hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        sizes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}self_attn.q_norm.weight": (dim,),
            f"{prefix}self_attn.k_norm.weight": (dim,),
            f"{prefix}mlp.gate.weight": (shape["num_experts"], hidden),
        }
        for expert in range(shape["num_experts"]):
            sizes |= {
                f"{prefix}mlp.experts.{expert}.gate_proj.weight": (inner, hidden),
                f"{prefix}mlp.experts.{expert}.up_proj.weight": (inner, hidden),
                f"{prefix}mlp.experts.{expert}.down_proj.weight": (hidden, inner),
            }
    return sizes


def _write_tokenizer(directory: Path, vocab: int) -> None:
    """Write a tokenizer of all bytes and of as many further pieces as the vocabulary has."""
    pieces = [*ByteLevel.alphabet(), *(f"piece{number}" for number in range(vocab))][:vocab]
    tokenizer = Tokenizer(
        BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[])
    )
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))
