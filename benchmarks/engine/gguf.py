"""Writing of the benchmark's model as a GGUF file, which llama.cpp reads.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names are those that llama.cpp has for a
``qwen3moe``; the numbers are written as they are, float32.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open

VERSION, ALIGNMENT, FLOAT32 = 3, 32, 0
NORMAL, CONTROL = 1, 3  # kinds of tokens

WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}
OF_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


@dataclass(frozen=True)
class Stacked:
    """One tensor of the file: as many of the checkpoint, one after the other, along a dimension before theirs."""

    shape: tuple[int, ...]
    parts: list[str]

    kind: int = FLOAT32

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return 4 * prod(self.shape)


class Described(Protocol):
    """A tensor of the file, as its head describes it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, the slowest first."""
        ...

    @property
    def kind(self) -> int:
        """Number of its type."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        ...


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Write a Qwen3-MoE of one float32 file, with its byte-level BPE tokenizer, to ``path``.

    Prompts must come as token ids: how text is split before BPE is said only roughly.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    metadata = {**architecture_of(config), **_vocabulary(tokenizer)}
    with safe_open(checkpoint / "model.safetensors", "numpy") as weights, path.open("wb") as file:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 - no mapping
        tensors = _tensors(config, shapes)
        file.write(head_of(metadata, tensors))
        for tensor in tensors.values():
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            for part in tensor.parts:
                values = weights.get_tensor(part)
                assert values.dtype == "float32", f"{part} has dtype {values.dtype}"
                file.write(values.tobytes())


def architecture_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a Qwen3-MoE by the metadata that llama.cpp reads."""
    assert config["norm_topk_prob"], "llama.cpp normalises the weights of a Qwen3-MoE's experts"
    named = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_count": _num_experts(config),
        "expert_used_count": config["num_experts_per_tok"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": _rope_theta(config),
    }
    return {
        "general.architecture": "qwen3moe",
        "general.alignment": ALIGNMENT,
        **{f"qwen3moe.{name}": value for name, value in named.items()},
    }


def _num_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("num_local_experts") or config["num_experts"])


def _rope_theta(config: Mapping[str, Any]) -> float:
    """Read the base of the rotation, as files spell it now and before transformers 5."""
    return float((config.get("rope_parameters") or config)["rope_theta"])


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    ids = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    special = {t["id"] for t in tokenizer["added_tokens"]}
    assert sorted(ids.values()) == list(range(len(ids))), "a vocabulary has no gaps"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": sorted(ids, key=ids.__getitem__),
        "tokenizer.ggml.token_type": [CONTROL if i in special else NORMAL for i in range(len(ids))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }


def _tensors(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Stacked]:
    tensors: dict[str, Stacked] = {}

    def add(name: str, *parts: str, stacked: bool = False) -> None:
        shape = shapes[f"{parts[0]}.weight"]
        whole = (len(parts), *shape) if stacked else shape
        tensors[f"{name}.weight"] = Stacked(whole, [f"{part}.weight" for part in parts])

    for theirs, name in WHOLE.items():
        add(name, theirs)
    for layer in range(config["num_hidden_layers"]):
        before = f"model.layers.{layer}"
        for theirs, name in OF_LAYER.items():
            add(f"blk.{layer}.{name}", f"{before}.{theirs}")
        for theirs, name in OF_EXPERTS.items():
            experts = range(_num_experts(config))
            parts = [f"{before}.mlp.experts.{expert}.{theirs}" for expert in experts]
            add(f"blk.{layer}.{name}", *parts, stacked=True)
    used = {part for tensor in tensors.values() for part in tensor.parts}
    assert used == set(shapes), f"tensors without a place: {sorted(set(shapes) - used)}"
    return tensors


def head_of(metadata: Mapping[str, Any], tensors: Mapping[str, Described]) -> bytes:
    """Write all that comes before the tensors, which follow in this order, each from a multiple of ``ALIGNMENT`` on."""
    head = b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, packed = _value(value)
        head += _string(key) + struct.pack("<I", kind) + packed
    # From the end of the head, padded.
    offset = 0
    for name, tensor in tensors.items():
        # The fastest first
        dimensions = tensor.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        head += struct.pack("<IQ", tensor.kind, offset)
        offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
    return head + b"\0" * (-len(head) % ALIGNMENT)


def _value(value: Any) -> tuple[int, bytes]:
    """Number of the type, and the bytes."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
        case [int(), *_]:  # kinds of tokens, which llama.cpp wants signed
            return 9, struct.pack(f"<IQ{len(value)}i", 5, len(value), *value)
        case [str(), *_]:
            return 9, struct.pack("<IQ", 8, len(value)) + b"".join(map(_string, value))
    raise TypeError(f"no type of GGUF for {value!r}")


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded
