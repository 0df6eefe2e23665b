"""Whole models in published formats compute what models of their numbers compute."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.parity.cases import CPU, Served
from benchmarks.parity.published import FORMS, Published
from moesaic.errors import CheckpointError
from moesaic.experts.brownout.logical import LogicalExperts
from moesaic.experts.loaded import ExpertFiles, layout_of
from moesaic.experts.pace import LoadPace
from moesaic.kernels.gated_mlp import PlainMLP, make_mlp
from moesaic.kernels.linear import PackedLinear
from moesaic.kernels.packed_experts import PackedMLP
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert
from moesaic.models.weights.files import list_tensors
from moesaic.models.weights.tensor_names import layer_prefix, sparse_names
from moesaic.models.weights.tensor_reader import TensorReader
from tests.models.weights.formats.conftest import Make

FP32 = torch.float32


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_matrix_has_the_numbers_that_the_format_describes(
    make: Make, form: Published
) -> None:
    both = make("qwen3_moe", form.name)
    config, checkpoint = load_config(both.published), Checkpoint(both.published)
    numbers = load_file(both.values / "model.safetensors")

    reader = TensorReader(checkpoint, torch.float32, CPU, weight_format=config.weight_format)
    seen = 0
    for name, expected in numbers.items():
        if name.endswith("_proj.weight") and ".experts." not in name:
            found = reader.numbers(name, *expected.shape)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
            seen += 1
    for layer in config.moe_layers:
        names = sparse_names(config, numbers, layer).experts
        for expert in range(config.moe.num_experts):
            gate, up, down = (numbers[layer_prefix(layer) + n.format(expert)] for n in names)
            read = load_expert(checkpoint, config, layer, expert, torch.float32, CPU)
            for one, other in zip(
                read.numbers(torch.float32), (torch.cat((gate, up)), down), strict=True
            ):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=0)
                seen += 1
    assert seen == 4 * config.num_layers + 2 * len(config.moe_layers) * config.moe.num_experts


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize(
    "form", ["fp8, blocks of 32", "float-quantized, by channel", "awq", "gptq v1", "pack"]
)
def test_every_family_is_read_in_every_format(make: Make, family: str, form: str) -> None:
    make(family, form).compare_whole()


def test_gpt_oss_is_read_as_published(make: Make) -> None:
    both = make("gpt_oss", "mxfp4")

    both.compare_whole(least_std=0.1)
    stored, experts = list_tensors(both.published), "model.layers.0.mlp.experts."
    assert stored[f"{experts}gate_up_proj_blocks"].shape == (6, 64, 2, 16)
    assert stored[f"{experts}gate_up_proj_scales"].shape == (6, 64, 2)
    assert stored[f"{experts}down_proj_blocks"].shape == (6, 64, 1, 16)


def test_matrices_that_stay_numbers_may_stand_beside_quantised_ones(make: Make) -> None:
    both = make("qwen3_moe", "gptq v1, 4 bits, groups of 32, sym")
    numbers = load_file(both.values / "model.safetensors")
    kept = [f"{layer_prefix(1)}self_attn.k_proj", f"{layer_prefix(2)}self_attn.o_proj"]
    parts: dict[str, Any] = dict.fromkeys(
        f"{name}.{end}" for name in kept for end in ("qweight", "qzeros", "scales", "g_idx")
    )
    both.change(**parts, **{f"{name}.weight": numbers[f"{name}.weight"] for name in kept})

    both.compare()


def test_experts_that_are_not_all_quantised_are_refused(make: Make) -> None:
    both = make("qwen3_moe", "gptq v1, 4 bits, groups of 32, sym")
    numbers = load_file(both.values / "model.safetensors")
    name = f"{layer_prefix(2)}mlp.experts.3.up_proj"
    parts = dict.fromkeys(f"{name}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx"))
    both.change(**parts, **{f"{name}.weight": numbers[f"{name}.weight"]})

    with pytest.raises(CheckpointError, match=r"experts\.3.*partly quantised"):
        Served(both.published)


@pytest.mark.parametrize("form", ["fp8", "mxfp4", "awq", "gptq v1, 8", "pack"])
def test_united_experts_take_the_form_of_those_whose_places_they_take(
    make: Make, form: str
) -> None:
    both = make("qwen3_moe", form)
    config, checkpoint = load_config(both.published), Checkpoint(both.published)
    assert config.weight_format is not None
    layout = layout_of(config, torch.float32)
    united = LogicalExperts(checkpoint, config).read(0, 4 * config.moe.num_experts + 1, FP32, CPU)

    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.pack(united.gate_up, united.down, packed)

    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    numbers = LogicalExperts(Checkpoint(both.values), load_config(both.values))
    mean = numbers.read(0, 4 * config.moe.num_experts + 1, FP32, CPU)
    expected = PlainMLP(*mean.numbers(FP32))(x)
    error = (layout.view(packed)(x) - expected).std() / expected.std()
    assert error < (0.2 if layout.codes and layout.codes.kind == "int4" else 0.06)
    assert layout.codes == config.weight_format.held


@pytest.mark.parametrize(
    ("family", "form", "kinds"),
    [("gpt_oss", "mxfp4", ("int8", "int4")), ("qwen3_moe", "awq", ("int4", "int4"))],
)
def test_quantisation_at_load_leaves_codes_and_rounds_numbers(
    make: Make, family: str, form: str, kinds: tuple[str, str]
) -> None:
    both = make(family, form)
    config, checkpoint = load_config(both.published), Checkpoint(both.published)
    reader = TensorReader(checkpoint, FP32, CPU, "int8", weight_format=config.weight_format)
    read = load_expert(checkpoint, config, 0, 0, FP32, CPU)

    query = reader.linear(reader.weight(f"{layer_prefix(0)}self_attn.q_proj.weight", 64, 64))
    expert = reader.mlp(read.gate_up, read.down)

    assert isinstance(query, PackedLinear)
    assert isinstance(expert, PackedMLP)
    assert (query.matrix.form.kind, expert.matrices[1].form.kind) == kinds
    assert layout_of(config, FP32, "int8").name == layout_of(config, FP32).name


def test_what_published_models_have_beside_their_matrices_is_passed_over(make: Make) -> None:
    both = make("qwen3_moe", "gptq v1, 4 bits, groups of 32, sym")
    both.change(**{f"{layer_prefix(0)}self_attn.o_proj.bias": torch.zeros(64).half()})
    Checkpoint.of_model(both.published, load_config(both.published))

    both = make("qwen3_moe", "float-quantized, by tensor")
    both.change(**{f"{layer_prefix(0)}self_attn.o_proj.input_scale": torch.ones(1)})
    Checkpoint.of_model(both.published, load_config(both.published))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_expert_worker_computes_the_bits_of_a_process_that_has_all(
    make: Make, form: Published
) -> None:
    both = make("qwen3_moe", form.name)
    config, checkpoint = load_config(both.published), Checkpoint(both.published)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))

    apart = ExpertFiles(checkpoint, config, FP32, CPU).bring(LoadPace())(1, 3)

    read = load_expert(checkpoint, config, 1, 3, FP32, CPU)
    assert torch.equal(apart.mlp(x), make_mlp(read.gate_up, read.down)(x))
