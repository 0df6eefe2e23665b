"""Whole models in published formats compute what models of their numbers compute."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.parity.cases import CPU, Served, prompt_of
from benchmarks.parity.published import FORMS, Published
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import load_expert
from moesaic.models.weights.files import list_tensors
from moesaic.models.weights.inventory import tensor_names
from moesaic.models.weights.tensor_names import layer_prefix, sparse_names
from moesaic.models.weights.tensor_reader import TensorReader
from tests.models.weights.formats.conftest import Both

Make = Callable[[str, str], Both]
PROMPT = prompt_of(40, seed=3)
TABLE = list(range(8))


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
    both = make(family, form)
    stored = list_tensors(both.published)

    found = Served(both.published).forward([(PROMPT, 0, TABLE)])

    assert set(tensor_names(load_config(both.published), stored)) == set(stored)
    expected = Served(both.values).forward([(PROMPT, 0, TABLE)])
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_gpt_oss_is_read_as_published(make: Make) -> None:
    both = make("gpt_oss", "mxfp4")
    stored = list_tensors(both.published)

    found = Served(both.published).forward([(PROMPT, 0, TABLE)])

    experts = "model.layers.0.mlp.experts."
    assert stored[f"{experts}gate_up_proj_blocks"].shape == (6, 64, 2, 16)
    assert stored[f"{experts}gate_up_proj_scales"].shape == (6, 64, 2)
    assert stored[f"{experts}down_proj_blocks"].shape == (6, 64, 1, 16)
    assert set(tensor_names(load_config(both.published), stored)) == set(stored)
    expected = Served(both.values).forward([(PROMPT, 0, TABLE)])
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_matrices_that_stay_numbers_may_stand_beside_quantised_ones(make: Make) -> None:
    both = make("qwen3_moe", "gptq v1, 4 bits, groups of 32, sym")
    numbers = load_file(both.values / "model.safetensors")
    kept = [f"{layer_prefix(1)}self_attn.k_proj", f"{layer_prefix(2)}mlp.experts.3.up_proj"]
    parts: dict[str, Any] = dict.fromkeys(
        f"{name}.{end}" for name in kept for end in ("qweight", "qzeros", "scales", "g_idx")
    )
    both.change(**parts, **{f"{name}.weight": numbers[f"{name}.weight"] for name in kept})

    found = Served(both.published).forward([(PROMPT, 0, TABLE)])

    expected = Served(both.values).forward([(PROMPT, 0, TABLE)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_what_published_models_have_beside_their_matrices_is_passed_over(make: Make) -> None:
    both = make("qwen3_moe", "gptq v1, 4 bits, groups of 32, sym")
    both.change(**{f"{layer_prefix(0)}self_attn.o_proj.bias": torch.zeros(64).half()})
    Checkpoint.of_model(both.published, load_config(both.published))

    both = make("qwen3_moe", "float-quantized, by tensor")
    both.change(**{f"{layer_prefix(0)}self_attn.o_proj.input_scale": torch.ones(1)})
    Checkpoint.of_model(both.published, load_config(both.published))
