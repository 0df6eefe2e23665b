"""A random checkpoint of Qwen3-30B-A3B's width, with few layers, as published ones are laid out."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 768, 32, 4, 128, 16_384
SHARD_BYTES = 400_000_000


def write_checkpoint(directory: Path, dtype: str, *, num_layers: int, num_experts: int) -> None:
    """Write the configuration, the shards and their index into ``directory``."""
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 6144,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_experts": num_experts,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": INNER,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": dtype,
    }
    (directory / "config.json").write_text(json.dumps(config))
    stored, index = getattr(torch, dtype), dict[str, str]()
    shard, size, number = dict[str, Tensor](), 0, 0

    def flush() -> None:
        nonlocal shard, size, number
        number += 1
        name = f"model-{number:05d}.safetensors"
        save_file(shard, directory / name)
        index.update(dict.fromkeys(shard, name))
        shard, size = {}, 0

    for name, shape in _shapes(num_layers, num_experts):
        tensor = torch.ones(shape) if len(shape) == 1 else torch.randn(shape).mul_(0.02)
        shard[name] = tensor.to(stored)
        size += shard[name].nbytes
        if size > SHARD_BYTES:
            flush()
    flush()
    written = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(written)


def _shapes(num_layers: int, num_experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (HIDDEN,)
        yield f"{prefix}self_attn.q_proj.weight", (queries, HIDDEN)
        yield f"{prefix}self_attn.k_proj.weight", (keys, HIDDEN)
        yield f"{prefix}self_attn.v_proj.weight", (keys, HIDDEN)
        yield f"{prefix}self_attn.o_proj.weight", (HIDDEN, queries)
        for norm in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{norm}.weight", (HEAD_DIM,)
        yield f"{prefix}mlp.gate.weight", (num_experts, HIDDEN)
        for expert in range(num_experts):
            named = f"{prefix}mlp.experts.{expert}"
            yield f"{named}.gate_proj.weight", (INNER, HIDDEN)
            yield f"{named}.up_proj.weight", (INNER, HIDDEN)
            yield f"{named}.down_proj.weight", (HIDDEN, INNER)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)
