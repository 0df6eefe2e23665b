"""Writes small models as quantised ones are published, by each format's own description, and what they stand for.

Nothing here is shared with what reads them: words are made by shifts, number by number, and values by the formulas.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = NDArray[Any]
Written = tuple[dict[str, Tensor], Array]
"""Tensors by the ends of their names, and the values ``[out, in]`` that they stand for."""

KEPT = ("gate.weight", "router.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Published:
    """One format with its options.

    Attributes:
        name: name of the format.
        fields: fields of ``quantization_config``.
        write: quantises one matrix ``[out, in]``, with a source of chance.
        fused: it has the experts of a layer in one tensor, and nothing else.
    """

    name: str
    fields: Mapping[str, Any]
    write: Callable[[Array, np.random.Generator], Written]
    fused: bool = field(default=False)

    def __str__(self) -> str:
        return self.name


def publish(model: Path, published: Path, values: Path, form: Published) -> None:
    """Quantise the float model in directory ``model``.

    Args:
        model: a directory as transformers saves it, one file, an expert's matrices one by one.
        published: the directory to make, of the quantised model.
        values: the directory to make, of a float32 model of what the quantised one stands for.
        form: the format.
    """
    source = load_file(model / "model.safetensors")
    quantised: dict[str, Tensor] = {}
    stands_for: dict[str, Tensor] = {}
    chance = np.random.default_rng(5)
    fused: dict[str, list[tuple[str, Array]]] = {}
    for name, tensor in source.items():
        # gpt-oss: ``[E, in, out]``, codes the other way round.
        if form.fused and tensor.ndim == 3:
            every = [form.write(own.T.double().numpy(), chance) for own in tensor]
            for end in every[0][0]:
                quantised[f"{name}_{end}"] = torch.stack([parts[end] for parts, _ in every])
            stands_for[name] = torch.stack([torch.from_numpy(own.T).float() for _, own in every])
            continue
        matrix = tensor.ndim == 2 and name.endswith(".weight") and not name.endswith(KEPT)
        if not matrix or (form.fused and ".experts." not in name):
            quantised[name] = stands_for[name] = tensor
            continue
        prefix = name.removesuffix(".weight")
        if form.fused:
            head, _, tail = prefix.partition(".experts.")
            fused.setdefault(f"{head}.experts", []).append((tail, tensor.double().numpy()))
            continue
        parts, array = form.write(tensor.double().numpy(), chance)
        quantised |= {f"{prefix}.{end}": part for end, part in parts.items()}
        stands_for[name] = torch.from_numpy(array).float()
    for prefix, matrices in fused.items():
        _fuse(prefix, dict(matrices), form, quantised, stands_for)
    config = json.loads((model / "config.json").read_text())
    for directory, tensors in ((published, quantised), (values, stands_for)):
        shutil.copytree(model, directory, dirs_exist_ok=True)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, directory / "model.safetensors", {"format": "pt"})
    (published / "config.json").write_text(
        json.dumps({**config, "quantization_config": dict(form.fields)})
    )


def _fuse(
    prefix: str,
    matrices: Mapping[str, Array],
    form: Published,
    quantised: dict[str, Tensor],
    stands_for: dict[str, Tensor],
) -> None:
    experts = sorted({int(tail.split(".")[0]) for tail in matrices})
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        written = []
        for expert in experts:
            whole = np.concatenate([matrices[f"{expert}.{part}"] for part in parts])
            tensors, array = form.write(whole, np.random.default_rng(0))
            written.append(tensors)
            for part, values in zip(parts, np.split(array, len(parts)), strict=True):
                stands_for[f"{prefix}.{expert}.{part}.weight"] = torch.from_numpy(values).float()
        for end in written[0]:
            quantised[f"{prefix}.{name}_{end}"] = torch.stack([each[end] for each in written])


def _words(codes: Array, bits: int) -> Tensor:
    """Pack ``[n, m]`` along the last axis, int32, from the low end."""
    per_word = 32 // bits
    num_rows, width = codes.shape
    padded = np.zeros((num_rows, -(-width // per_word) * per_word), np.uint64)
    padded[:, :width] = codes
    words = np.zeros((num_rows, padded.shape[1] // per_word), np.uint64)
    for place in range(per_word):
        words |= padded[:, place::per_word] << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _whole_numbers(
    weight: Array, bits: int, group_of: Array, symmetric: bool, kept: torch.dtype
) -> tuple[Array, Array, Array, Array]:
    """Round to codes ``[out, in]``, scales and zeros ``[out, groups]``, and the values."""
    groups, top = int(group_of.max()) + 1, 2**bits - 1
    scales = np.zeros((len(weight), groups))
    zeros = np.full((len(weight), groups), 2 ** (bits - 1))
    codes = np.zeros(weight.shape, np.int64)
    for group in range(groups):
        mine = group_of == group
        part = weight[:, mine]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        step = np.abs(part).max(1) / (2 ** (bits - 1) - 1) if symmetric else (high - low) / top
        scale = torch.from_numpy(step).to(kept).double().numpy()
        scales[:, group] = scale
        if not symmetric:
            zeros[:, group] = np.clip(np.round(-low / scale), 0, top)
        rounded = np.round(part / scale[:, None]) + zeros[:, group][:, None]
        codes[:, mine] = np.clip(rounded, 0, top)
    values = (codes - zeros[:, group_of]) * scales[:, group_of]
    return codes, scales, zeros, values


def _side_by_side(num_in: int, group: int) -> Array:
    return np.arange(num_in) // (num_in if group == -1 else group)


def _gptq(
    bits: int, group: int, *, sym: bool, desc_act: bool = False, version: int = 1
) -> Published:
    def write(weight: Array, chance: np.random.Generator) -> Written:
        group_of = _side_by_side(weight.shape[1], group)
        if desc_act:
            group_of = chance.permutation(group_of)
        codes, scales, zeros, values = _whole_numbers(weight, bits, group_of, sym, torch.float16)
        stored_zeros = (zeros - (version == 1)) % 2**bits
        return {
            "qweight": _words(codes, bits).t(),
            "qzeros": _words(stored_zeros.T, bits),
            "scales": torch.from_numpy(scales.T).half(),
            "g_idx": torch.from_numpy(group_of).int(),
        }, values

    fields = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": sym,
        "desc_act": desc_act,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }
    told = (
        f"{bits} bits, groups of {group}{', sym' if sym else ''}{', desc_act' if desc_act else ''}"
    )
    return Published(f"gptq v{version}, {told}", fields, write)


def _awq(group: int) -> Published:
    def write(weight: Array, chance: np.random.Generator) -> Written:
        group_of = _side_by_side(weight.shape[1], group)
        codes, scales, zeros, values = _whole_numbers(weight, 4, group_of, False, torch.float16)

        def interleaved(array: Array) -> Tensor:
            in_words = array.T.reshape(array.shape[1], -1, 8)[:, :, list(_AWQ_ORDER)]
            return _words(in_words.reshape(array.shape[1], -1), 4)

        return {
            "qweight": interleaved(codes),
            "qzeros": interleaved(zeros),
            "scales": torch.from_numpy(scales.T).half(),
        }, values

    fields = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["gate"],
    }
    return Published(f"awq, groups of {group}", fields, write)


def _packed(bits: int, group: int, *, symmetric: bool) -> Published:
    def write(weight: Array, chance: np.random.Generator) -> Written:
        group_of = _side_by_side(weight.shape[1], group)
        codes, scales, zeros, values = _whole_numbers(
            weight, bits, group_of, symmetric, torch.bfloat16
        )
        tensors = {
            "weight_packed": _words(codes, bits),
            "weight_scale": torch.from_numpy(scales).bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _words(zeros.T, bits).t()
        return tensors, values

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
        "group_size": -1 if group == -1 else group,
        "actorder": None,
        "dynamic": False,
    }
    fields = _compressed("pack-quantized", weights)
    told = "symmetric" if symmetric else "with zero points"
    return Published(f"pack-quantized, {bits} bits, groups of {group}, {told}", fields, write)


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": scheme},
    }


def _fp8(
    name: str, fields: dict[str, Any], rows: int | None, columns: int | None, end: str
) -> Published:
    """Blocks of ``rows`` by ``columns``; None: all of them."""

    def write(weight: Array, chance: np.random.Generator) -> Written:
        num_out, num_in = weight.shape
        high, wide = rows or num_out, columns or num_in
        scales = np.zeros((-(-num_out // high), -(-num_in // wide)))
        codes = torch.zeros(num_out, num_in, dtype=torch.float8_e4m3fn)
        values = np.zeros(weight.shape)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
                scales[i, j] = np.float32(np.abs(weight[block]).max() / 448)
                own = torch.from_numpy(weight[block] / scales[i, j]).float()
                codes[block] = own.to(torch.float8_e4m3fn)
                values[block] = codes[block].double().numpy() * scales[i, j]
        stored = torch.from_numpy(scales).float()
        return {"weight": codes, end: stored.view(1) if rows is None else stored}, values

    return Published(name, fields, write)


def _fp8_blocks(high: int, wide: int) -> Published:
    fields = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [high, wide],
    }
    return _fp8(f"fp8, blocks of {high} x {wide}", fields, high, wide, "weight_scale_inv")


def _fp8_scheme(strategy: str) -> Published:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    fields = _compressed("float-quantized", weights)
    rows = 1 if strategy == "channel" else None
    return _fp8(f"float-quantized, by {strategy}", fields, rows, None, "weight_scale")


def _mxfp4() -> Published:
    def write(weight: Array, chance: np.random.Generator) -> Written:
        num_out, num_in = weight.shape
        blocks = weight.reshape(num_out, num_in // 32, 32)
        exponents = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
        scaled = blocks / 2.0 ** exponents[..., None]
        nearest = np.abs(np.abs(scaled)[..., None] - _E2M1).argmin(-1)
        codes = nearest + 8 * (scaled < 0)
        octets = codes[..., 0::2] + 16 * codes[..., 1::2]
        values = np.where(codes >= 8, -1, 1) * _E2M1[codes % 8] * 2.0 ** exponents[..., None]
        return {
            "blocks": torch.from_numpy(octets.astype(np.uint8)),
            "scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
        }, values.reshape(weight.shape)

    fields = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    return Published("mxfp4", fields, write, fused=True)


FORMS = [
    _fp8_blocks(128, 128),
    _fp8_blocks(32, 32),
    _fp8_blocks(16, 24),
    _fp8_scheme("channel"),
    _fp8_scheme("tensor"),
    _mxfp4(),
    _awq(32),
    _awq(64),
    _gptq(4, 32, sym=True),
    _gptq(4, 32, sym=False),
    _gptq(4, 32, sym=False, version=2),
    _gptq(4, -1, sym=True, desc_act=True),
    _gptq(4, 32, sym=False, desc_act=True),
    _gptq(8, 32, sym=True),
    _gptq(8, 32, sym=False),
    _packed(4, 32, symmetric=True),
    _packed(4, 32, symmetric=False),
    _packed(4, -1, symmetric=True),
    _packed(8, 32, symmetric=False),
]
