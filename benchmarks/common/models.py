"""Checkpoints of random weights, of published shapes and of small ones: the only maker of models to be measured.

Two families: grouped-query attention (Qwen3-MoE) and latent attention (DeepSeek-V2). Weights are small normal numbers,
norms are ones. Parity with other families needs models that transformers makes: ``benchmarks.parity.cases``.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
STD = 0.02
MXFP4_GROUP = 32
SHARD_BYTES = 400_000_000
MXFP4_BYTES = {"_blocks": (0, 256), "_scales": (119, 122)}  # bytes from .. to, the end excluded

_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
QWEN3_30B: dict[str, Any] = {
    **_QWEN3_MOE,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40_960,
}
QWEN3_235B: dict[str, Any] = {
    **QWEN3_30B,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
DEEPSEEK_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 5120,
    "num_hidden_layers": 60,
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
    "intermediate_size": 12_288,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 163_840,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4"},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def qwen3_moe(**fields: Any) -> dict[str, Any]:
    """Fill in the fields of ``config.json`` of a small Qwen3-MoE that ``fields`` leaves out.

    Needed are ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``num_key_value_heads``, ``head_dim``,
    ``num_experts``, ``num_experts_per_tok`` and ``moe_intermediate_size``.
    """
    usual = {
        **_QWEN3_MOE,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
    }
    return {**usual, "intermediate_size": fields["moe_intermediate_size"], **fields}


# Experts have 340 MB in float32, which no cache of a processor holds.
MIDDLE = qwen3_moe(
    hidden_size=384,
    num_hidden_layers=12,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=384,
)


def write_model(
    directory: Path,
    config: Mapping[str, Any],
    dtype: str = "bfloat16",
    *,
    with_experts: bool = True,
    tokenizer: Path | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Write a random model as published ones are: configuration, and one file or shards with their index.

    Args:
        directory: to write into; made if it is not there.
        config: the fields of ``config.json``, of one of the families above, all layers sparse.
        dtype: dtype of all weights, as PyTorch names it.
        with_experts: False leaves out routed experts and their gates, which are most of a model.
        tokenizer: a model directory whose tokenizer is copied; None: there is none.
        seed: seed of the weights, which differ by device.
        device: device that draws the weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    for name in TOKENIZER_FILES if tokenizer else ():
        shutil.copy(Path(str(tokenizer)) / name, directory)
    index, shards = (
        dict[str, str](),
        _shards(config, getattr(torch, dtype), with_experts, seed, device),
    )
    for number, shard in enumerate(shards):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, directory / name, {"format": "pt"})
        index |= dict.fromkeys(shard, name)
    if len(set(index.values())) == 1:
        (directory / name).rename(directory / "model.safetensors")
        return
    written = json.dumps({"metadata": {}, "weight_map": index})
    (directory / "model.safetensors.index.json").write_text(written)


def _shards(
    config: Mapping[str, Any], dtype: torch.dtype, with_experts: bool, seed: int, device: str
) -> Iterator[dict[str, Tensor]]:
    random, shard, nbytes = torch.Generator(device).manual_seed(seed), dict[str, Tensor](), 0
    for name, shape in tensor_shapes(config, with_experts):
        if nbytes > SHARD_BYTES:
            yield shard
            shard, nbytes = {}, 0
        shard[name] = _drawn(name, shape, dtype, random).cpu()
        nbytes += shard[name].nbytes
    yield shard


def _drawn(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator
) -> Tensor:
    """Draw a tensor; of MXFP4 codes and exponents of two, whose weights are about as large as others."""
    device = random.device
    for suffix, (low, high) in MXFP4_BYTES.items():
        if name.endswith(suffix):
            drawn = torch.randint(low, high, shape, generator=random, device=device)
            return drawn.to(torch.uint8)
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype)
    return (torch.randn(shape, generator=random, device=device) * STD).to(dtype)


def tensor_shapes(
    config: Mapping[str, Any], with_experts: bool = True
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List the tensors of a checkpoint, in the order of its layers, with their shapes."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    if config["model_type"] == "gpt_oss":
        yield from _gpt_oss(config)
        return
    attention = _latent(config) if "kv_lora_rank" in config else _grouped(config)
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", (hidden,)
        for name, shape in attention.items():
            yield f"{at}self_attn.{name}.weight", shape
        size = config["moe_intermediate_size"]
        if shared := config.get("n_shared_experts"):
            yield from _gated(f"{at}mlp.shared_experts.", shared * size, hidden)
        if with_experts:
            num_experts = config.get("num_experts") or config["n_routed_experts"]
            yield f"{at}mlp.gate.weight", (num_experts, hidden)
            for expert in range(num_experts):
                yield from _gated(f"{at}mlp.experts.{expert}.", size, hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _gated(at: str, size: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}gate_proj.weight", (size, hidden)
    yield f"{at}up_proj.weight", (size, hidden)
    yield f"{at}down_proj.weight", (hidden, size)


def _grouped(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "q_norm": (dim,),
        "k_norm": (dim,),
    }


def _latent(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    queries, latent, values = config["q_lora_rank"], config["kv_lora_rank"], config["v_head_dim"]
    return {
        "q_a_proj": (queries, hidden),
        "q_a_layernorm": (queries,),
        "q_b_proj": (heads * (nope + rope), queries),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + values), latent),
        "o_proj": (hidden, heads * values),
    }


def _gpt_oss(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, size, experts = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_local_experts")
    )
    dim = config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{norm}.weight", (hidden,)
        widths = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
        for name, shape in {**widths, "o": (hidden, queries)}.items():
            yield f"{at}self_attn.{name}_proj.weight", shape
            yield f"{at}self_attn.{name}_proj.bias", shape[:1]
        yield f"{at}self_attn.sinks", (config["num_attention_heads"],)
        yield f"{at}mlp.router.weight", (experts, hidden)
        yield f"{at}mlp.router.bias", (experts,)
        for name, rows, cols in (("gate_up", 2 * size, hidden), ("down", hidden, size)):
            groups = cols // MXFP4_GROUP
            prefix = f"{at}mlp.experts.{name}_proj"
            yield f"{prefix}_blocks", (experts, rows, groups, MXFP4_GROUP // 2)
            yield f"{prefix}_scales", (experts, rows, groups)
            yield f"{prefix}_bias", (experts, rows)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
