"""The shapes, names and dtypes of scales in fp8 files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.parity.cases import CPU, Served
from moesaic.errors import CheckpointError
from moesaic.kernels.stored_weights import dequantised
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.weight_format import WeightFormat
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert
from moesaic.models.weights.formats.reading import read_matrix
from tests.models.weights.formats.conftest import Make, logits_of, some

BLOCKS = "fp8, blocks of 32 x 32"
AUTOFP8 = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
    "kv_cache_scheme": None,
}
TRANSFORMERS_5 = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "dequantize": False,
    "expert_dtype": "fp8",
    "modules_to_convert": None,
    "modules_to_not_convert": ["lm_head"],
    "scale_fmt": "float",
    "weight_block_size": None,
}


@pytest.mark.parametrize(
    ("told", "scale", "activation"),
    [
        (AUTOFP8, "weight_scale", "input_scale"),
        (TRANSFORMERS_5, "weight_scale_inv", "activation_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_of_all_weights_may_have_any_shape_of_one_number(
    make: Make, told: dict[str, Any], scale: str, activation: str, shape: tuple[int, ...]
) -> None:
    both = make("qwen3_moe", "float-quantized, by tensor")
    tensors = {}
    for name, tensor in both.tensors.items():
        prefix, _, end = name.rpartition(".")
        if end == "weight_scale":
            tensors[f"{prefix}.{scale}"] = tensor.view(shape)
            tensors[f"{prefix}.{activation}"] = torch.ones(shape)
        else:
            tensors[name] = tensor
    both.rewrite(tensors, told)

    both.compare()


@pytest.mark.parametrize("told", [AUTOFP8, TRANSFORMERS_5])
@pytest.mark.parametrize("axes", [1, 2])
def test_scales_of_outputs_are_recognised_by_their_shape(
    make: Make, told: dict[str, Any], axes: int
) -> None:
    both = make("qwen3_moe", "float-quantized, by channel")
    whole = both.tensors
    both.rewrite(
        {n: t.flatten() if axes == 1 and "_scale" in n else t for n, t in whole.items()}, told
    )

    both.compare()


def test_blocks_that_the_configuration_leaves_out_are_of_128_as_in_transformers(
    make: Make,
) -> None:
    both = make("mixtral", "fp8, blocks of 128")
    both.configure(weight_block_size=...)

    both.compare()


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("told", [{}, {"scale_fmt": "ue8m0"}])
def test_scales_may_be_powers_of_two_as_deepseek_v31_has_them(
    make: Make, dtype: torch.dtype, told: dict[str, Any]
) -> None:
    both = make("deepseek_v2", BLOCKS)
    whole = both.tensors
    scales = {
        name: torch.exp2(torch.log2(tensor).ceil())
        for name, tensor in whole.items()
        if name.endswith("_scale_inv")
    }
    both.change(**scales)
    expected = logits_of(both.published)

    stored = torch.float8_e8m0fnu if dtype == torch.uint8 else dtype
    both.change(**{name: tensor.to(stored).view(dtype) for name, tensor in scales.items()})
    both.configure(**told)

    assert torch.equal(logits_of(both.published), expected)


def test_the_ends_of_ue8m0_are_read_and_nan_is_refused(tmp_path: Path) -> None:
    def numbers(exponent: int) -> Tensor:
        codes = torch.ones(32, 32).to(torch.float8_e4m3fn)
        scales = torch.tensor([[exponent]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        tensors = {"x.weight": codes, "x.weight_scale_inv": scales}
        save_file(tensors, tmp_path / "model.safetensors")
        form = WeightFormat("fp8", 8, 32, 32, "weight_scale_inv")
        read = read_matrix(Checkpoint(tmp_path), form, "x.weight", (32, 32), torch.float32, CPU)
        return dequantised(read, torch.float32)

    assert float(numbers(127)[0, 0]) == 1
    assert float(numbers(254)[0, 0]) == 2.0**127
    assert float(numbers(0)[0, 0]) == 2.0**-127
    with pytest.raises(CheckpointError, match=r"weight_scale_inv.*NaN"):
        numbers(255)


def fused(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join experts as transformers has them in memory: codes and scales of gate above those of up."""
    tensors, found = {}, dict[tuple[str, str], dict[tuple[int, str], Tensor]]()
    for name, tensor in whole.items():
        head, _, tail = name.partition(".experts.")
        if not tail:
            tensors[name] = tensor
            continue
        expert, matrix, end = tail.split(".")
        place = found.setdefault((f"{head}.experts.", end.removeprefix("weight")), {})
        place[int(expert), matrix] = tensor
    for (head, end), matrices in found.items():
        experts = sorted({expert for expert, _ in matrices})
        halves = [[matrices[i, f"{part}_proj"] for part in ("gate", "up")] for i in experts]
        tensors[f"{head}gate_up_proj{end}"] = torch.stack([torch.cat(both) for both in halves])
        tensors[f"{head}down_proj{end}"] = torch.stack([matrices[i, "down_proj"] for i in experts])
    return tensors


@pytest.mark.parametrize(
    ("family", "form", "told"),
    [
        ("qwen3_moe", BLOCKS, {}),
        ("qwen3_moe", "fp8, blocks of 128", {}),  # 160 outputs of each half fill no blocks
        ("qwen3_moe", "fp8, blocks of 16", {}),
        ("deepseek_v2", BLOCKS, {"scale_fmt": "float"}),
        ("qwen3_moe", "float-quantized, by channel", {}),
        ("qwen3_moe", "float-quantized, by tensor", {}),
    ],
)
def test_fp8_experts_may_be_in_one_tensor(
    make: Make, family: str, form: str, told: dict[str, Any]
) -> None:
    both = make(family, form)
    config = both.told
    whole = both.tensors
    if "tensor" in form:
        whole = {n: t.view(1, 1) if n.endswith("_scale") else t for n, t in whole.items()}
    both.rewrite(fused(whole), config | told)

    both.compare_whole()


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", BLOCKS),
        ("qwen3_moe", "fp8, blocks of 128"),
        ("deepseek_v2", "fp8, blocks of 128"),
        ("mixtral", BLOCKS),
    ],
)
def test_scales_of_separate_experts_may_be_in_one_tensor(
    make: Make, family: str, form: str
) -> None:
    """Files in the form that transformers saves after quantising a model."""
    both = make(family, form)
    told = both.told
    whole = both.tensors
    usual = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

    def renamed(name: str) -> str:
        return ".".join(usual.get(part, part) for part in name.split("."))

    scales = {n for n in whole if ".experts." in n and n.endswith("_scale_inv")}
    together = fused({renamed(name): whole[name] for name in scales})
    both.rewrite({n: t for n, t in whole.items() if n not in scales} | together, told)

    both.compare_whole()
    damaged = f"{min(n for n in whole if '.experts.' in n and n.endswith('.weight'))}"
    both.change(**{damaged: some(whole[damaged], float("nan"))})
    with pytest.raises(CheckpointError, match=rf"{damaged}.*NaN"):
        Served(both.published)


def test_experts_in_one_tensor_with_ambiguous_blocks_are_refused(make: Make) -> None:
    both = make("qwen3_moe", "fp8, blocks of 128")
    whole = fused(both.tensors)
    name = "model.layers.0.mlp.experts.gate_up_proj_scale_inv"
    both.configure(weight_block_size=[90, 128])  # 2 for each half of 160, and 4 for the whole
    told = both.told
    assert whole[name].shape == (8, 4, 1)
    both.rewrite(whole, told)
    config, checkpoint = load_config(both.published), Checkpoint(both.published)

    with pytest.raises(CheckpointError, match=f"{name}.*160 outputs of gate and of up do not fill"):
        load_expert(checkpoint, config, 0, 0, torch.float32, CPU)


def test_unquantised_experts_in_one_tensor_are_refused(make: Make) -> None:
    both = make("qwen3_moe", BLOCKS)
    numbers = load_file(both.values / "model.safetensors")
    whole = both.tensors
    of_experts = {n: t for n, t in numbers.items() if ".experts." in n}
    told = both.told
    kept = {n: t for n, t in whole.items() if ".experts." not in n}
    both.rewrite(kept | fused(of_experts), told)

    with pytest.raises(CheckpointError, match="partly quantised experts"):
        Served(both.published)
