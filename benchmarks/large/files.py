"""Writing of a random Qwen3-MoE as two files' worth of the same numbers: a checkpoint, and a GGUF file.

Neither is ever whole in memory. Weights of 4 bits are in the checkpoint as compressed-tensors has them
(``pack-quantized``); embedding and head are bfloat16 there, Q4_0 and Q6_K in the GGUF file.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from benchmarks.engine.gguf import ALIGNMENT, head_of
from benchmarks.large.weights import GROUP, Matrix, Pool, parts_of

F32, Q4_0, Q6_K = 0, 2, 14  # types of GGUF
_BLOCKS = {F32: (1, 4), Q4_0: (32, 18), Q6_K: (256, 210)}  # numbers and bytes of a block
_ROWS_AT_ONCE = 8192
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": GROUP,
            },
        }
    },
}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the GGUF file."""

    shape: tuple[int, ...]
    kind: int

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        numbers, size = _BLOCKS[self.kind]
        return prod(self.shape) // numbers * size


class _Shard:
    """One safetensors file, whose tensors come in the order in which they were announced."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> None:
        header, start = {}, 0
        for name, (dtype, shape, nbytes) in tensors.items():
            offsets = [start, start + nbytes]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
            start += nbytes
        raw = json.dumps(header).encode()
        self.file: BinaryIO = path.open("wb")
        self.file.write(struct.pack("<Q", len(raw)) + raw)


def write_pair(
    config: Mapping[str, Any],
    metadata: Mapping[str, Any],
    checkpoint: Path,
    gguf: Path,
    told: Callable[[str], None],
) -> None:
    """Write the same random model as a checkpoint without a tokenizer, and as a GGUF file.

    Args:
        config: the fields of ``config.json``, of a Qwen3-MoE.
        metadata: metadata of the GGUF file.
        checkpoint: directory of the one.
        gguf: path of the other.
        told: called with the progress.
    """
    pool = Pool(seed=1)
    tensors = dict(_gguf_tensors(config))
    weight_map: dict[str, str] = {}
    with gguf.open("wb") as other:
        other.write(head_of(metadata, tensors))
        for layer in range(config["num_hidden_layers"]):
            told(f"layer {layer + 1} of {config['num_hidden_layers']}")
            file = f"model-{layer:05}.safetensors"
            weight_map |= dict.fromkeys(
                _write_layer(config, layer, pool, checkpoint / file, other), file
            )
        file = "model-ends.safetensors"
        weight_map |= dict.fromkeys(_write_ends(config, pool, checkpoint / file, other), file)
    index = {"metadata": {}, "weight_map": weight_map}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    quantised = {**config, "quantization_config": QUANTIZATION}
    (checkpoint / "config.json").write_text(json.dumps(quantised, indent=2))


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Shapes of a layer's matrices, by their names in the checkpoint, those of experts without a number."""
    hidden, dim, size = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (heads * dim, hidden),
        "self_attn.k_proj": (kv_heads * dim, hidden),
        "self_attn.v_proj": (kv_heads * dim, hidden),
        "self_attn.o_proj": (hidden, heads * dim),
        "gate_proj": (size, hidden),
        "up_proj": (size, hidden),
        "down_proj": (hidden, size),
    }


_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
_NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def _gguf_tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, GgufTensor]]:
    hidden, vocab, experts = config["hidden_size"], config["vocab_size"], config["num_experts"]
    for layer in range(config["num_hidden_layers"]):
        at = f"blk.{layer}."
        for theirs, name in _NORMS.items():
            size = config["head_dim"] if "self_attn" in theirs else hidden
            yield f"{at}{name}.weight", GgufTensor((size,), F32)
        yield f"{at}ffn_gate_inp.weight", GgufTensor((experts, hidden), F32)
        for theirs, shape in _shapes(config).items():
            stacked = shape if "self_attn" in theirs else (experts, *shape)
            yield f"{at}{_NAMES[theirs]}.weight", GgufTensor(stacked, Q4_0)
    yield "output_norm.weight", GgufTensor((hidden,), F32)
    yield "token_embd.weight", GgufTensor((vocab, hidden), Q4_0)
    yield "output.weight", GgufTensor((vocab, hidden), Q6_K)


def _write_layer(
    config: Mapping[str, Any], layer: int, pool: Pool, path: Path, gguf: BinaryIO
) -> list[str]:
    hidden, experts, at = config["hidden_size"], config["num_experts"], f"model.layers.{layer}."
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for theirs in _NORMS:
        size = config["head_dim"] if "self_attn" in theirs else hidden
        tensors[f"{at}{theirs}.weight"] = "F32", (size,), 4 * size
    tensors[f"{at}mlp.gate.weight"] = "F32", (experts, hidden), 4 * experts * hidden
    matrices: list[tuple[str, tuple[int, int]]] = []
    for theirs, shape in _shapes(config).items():
        if "self_attn" in theirs:
            matrices.append((f"{at}{theirs}", shape))
        else:
            matrices += [(f"{at}mlp.experts.{e}.{theirs}", shape) for e in range(experts)]
    for name, (num_out, num_in) in matrices:
        packed, scales = (num_out, num_in // 8), (num_out, num_in // GROUP)
        tensors[f"{name}.weight_packed"] = "I32", packed, num_out * num_in // 2
        tensors[f"{name}.weight_scale"] = "F16", scales, 2 * prod(scales)
        tensors[f"{name}.weight_shape"] = "I64", (2,), 16
    shard = _Shard(path, tensors)
    with shard.file as file:
        for theirs in _NORMS:
            size = config["head_dim"] if "self_attn" in theirs else hidden
            _put(np.ones(size, np.float32).tobytes(), file, gguf)
        _put(pool.matrix(experts, hidden).values().tobytes(), file, gguf)
        kind = ""
        for name, (num_out, num_in) in matrices:
            matrix = pool.matrix(num_out, num_in)
            file.write(matrix.codes.tobytes() + matrix.scales.tobytes())
            file.write(np.array([num_out, num_in], np.int64).tobytes())
            if kind != (kind := name.rsplit(".", 1)[1]):
                # The experts of a kind are one tensor there.
                _pad(gguf)
            gguf.write(matrix.q4_0())
    return list(tensors)


def _write_ends(config: Mapping[str, Any], pool: Pool, path: Path, gguf: BinaryIO) -> list[str]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table = "BF16", (vocab, hidden), 2 * vocab * hidden
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {
        "model.norm.weight": ("F32", (hidden,), 4 * hidden),
        "model.embed_tokens.weight": table,
        "lm_head.weight": table,
    }
    spelled: tuple[Callable[[Matrix], bytes], ...] = (Matrix.q4_0, Matrix.q6_k)
    with _Shard(path, tensors).file as file:
        _put(np.ones(hidden, np.float32).tobytes(), file, gguf)
        for write in spelled:
            _pad(gguf)
            for rows in parts_of(vocab, _ROWS_AT_ONCE):
                matrix = pool.matrix(rows, hidden)
                file.write(matrix.bfloat16())
                gguf.write(write(matrix))
    return list(tensors)


def _put(content: bytes, file: BinaryIO, gguf: BinaryIO) -> None:
    file.write(content)
    _pad(gguf)
    gguf.write(content)


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
