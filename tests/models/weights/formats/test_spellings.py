"""``quantization_config`` in the spelling of every tool is read correctly, or an error names a field."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.parity.cases import CPU
from benchmarks.parity.published import FORMS, Published
from moesaic.errors import CheckpointError
from moesaic.kernels.stored_weights import dequantised
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.quantization_fields import WITHOUT_EFFECT
from moesaic.models.configuration.weight_format import WeightFormat, read_weight_format
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats.reading import read_entry, read_matrix
from tests.models.weights.formats.conftest import form_of
from tests.models.weights.formats.spellings import MEANINGFUL, SPELLINGS, SPELT, Spelling

SYMMETRIC = "pack-quantized, 4 bits, groups of 32, symmetric"
SHAPE = (32, 192)  # a group of 128 is not filled


def read(told: dict[str, Any]) -> WeightFormat | None:
    return read_weight_format(Fields("config.json", {"quantization_config": told}))


def with_weights(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a form whose only scheme has other fields."""
    told = dict(form_of(form).fields)
    group = told["config_groups"]["group_0"]
    return told | {"config_groups": {"g": group | {"weights": group["weights"] | weights}}}


def written(form: Published) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a matrix in a form, and its numbers."""
    chance = np.random.default_rng(3)
    tensors, values = form.write(chance.normal(size=SHAPE), chance)
    between = "_" if form.fused else "."
    held = {f"x{between}{name}": tensor.contiguous() for name, tensor in tensors.items()}
    return held, torch.from_numpy(values).float()


@pytest.mark.parametrize(
    ("form", "tool", "spelling"), SPELT, ids=[f"{form}, {tool}" for form, tool, _ in SPELT]
)
def test_a_matrix_has_its_numbers_in_the_spelling_of_every_tool(
    tmp_path: Path, form: Published, tool: str, spelling: Spelling
) -> None:
    held, expected = written(form)
    weight_format = read(spelling(form.fields))
    if form.fused:
        held = {name: tensor[None] for name, tensor in held.items()}
    save_file(held, tmp_path / "model.safetensors")

    if form.fused:
        found = read_entry(
            Checkpoint(tmp_path), weight_format, "x", 0, (1, *SHAPE), torch.float32, CPU
        )
    else:
        found = read_matrix(
            Checkpoint(tmp_path), weight_format, "x.weight", SHAPE, torch.float32, CPU
        )

    torch.testing.assert_close(dequantised(found, torch.float32), expected, rtol=1e-6, atol=0)


BASES: dict[str, Callable[[], dict[str, Any]]] = {
    method: lambda method=method: dict(  # type: ignore[misc]  # a default binds the name
        next(form for form in FORMS if form.fields["quant_method"] == method).fields
    )
    for method in SPELLINGS
}


@pytest.mark.parametrize(
    ("method", "fields"),
    [(method, each) for method, all_of in MEANINGFUL.items() for each in all_of],
)
def test_a_field_that_changes_what_the_bytes_mean_is_named(
    method: str, fields: dict[str, Any]
) -> None:
    (name,) = fields

    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config\.{name}"):
        read(BASES[method]() | fields)


@pytest.mark.parametrize("method", SPELLINGS)
def test_empty_unknown_fields_are_accepted_and_others_named(method: str) -> None:
    told = BASES[method]()
    before = read(told)

    for name in WITHOUT_EFFECT[method]:
        assert read(told | {name: told.get(name, "something")}) == before
    for nothing in (None, False, "", [], {}):
        assert read(told | {"unheard_of": nothing}) == before
    for something in (0, 1, True, "x", [0], {"a": None}):
        with pytest.raises(CheckpointError, match=r"quantization_config\.unheard_of: .* leave it"):
            read(told | {"unheard_of": something})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "format: is 'gptq_v2', but"),
        ({"method": "awq"}, "quant_method: is 'gptq', but"),
    ],
)
def test_two_spellings_that_differ_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read(BASES["gptq"]() | fields)


@pytest.mark.parametrize("spelt", ["gptq_v2", "GPTQ_V2"])
@pytest.mark.parametrize("name", ["format", "checkpoint_format"])
def test_gptq_v2_is_recognised_by_either_field(name: str, spelt: str) -> None:
    told = BASES["gptq"]()
    told.pop("checkpoint_format")

    first, second = read(told), read(told | {name: spelt})

    assert first is not None
    assert second is not None
    assert (first.zero_offset, second.zero_offset) == (1, 0)


@pytest.mark.parametrize(
    ("weights", "field"),
    [
        ({"dynamic": True}, "dynamic"),
        ({"group_size": 64}, "group_size"),
        ({"block_structure": [128, 128]}, "block_structure"),
        ({"symmetric": False}, "symmetric"),
        ({"num_bits": 4}, "num_bits"),
        ({"scale_offset": 1}, "scale_offset"),
    ],
)
def test_a_field_of_a_scheme_that_changes_what_the_bytes_mean_is_named(
    weights: dict[str, Any], field: str
) -> None:
    told = with_weights("float-quantized, by channel", weights)

    with pytest.raises(CheckpointError, match=rf"config_groups\.g\.weights\.{field}: "):
        read(told)


@pytest.mark.parametrize(
    ("layout", "weights", "same"),
    [
        (
            "float-quantized, by channel",
            {"strategy": "BLOCK", "block_structure": "64x128"},
            {"strategy": "block", "block_structure": [64, 128]},
        ),
        (SYMMETRIC, {"actorder": True}, {"actorder": "group"}),
        (SYMMETRIC, {"actorder": "Weight", "strategy": None}, {"actorder": None}),
    ],
)
def test_a_scheme_in_another_spelling_is_the_same(
    layout: str, weights: dict[str, Any], same: dict[str, Any]
) -> None:
    told = dict(form_of(layout).fields)
    group = told["config_groups"]["group_0"]

    found, expected = (
        read(told | {"config_groups": {"g": group | {"weights": group["weights"] | each}}})
        for each in (weights, same)
    )

    assert found == expected


@pytest.mark.parametrize("block", ["64", "64x", "x", "axb", "0x128", "-1x128", "64x128x1", "٣x٣"])
def test_an_invalid_block_is_named(block: str) -> None:
    weights = {"strategy": "block", "block_structure": block}

    with pytest.raises(CheckpointError, match=r"weights\.block_structure: "):
        read(with_weights("float-quantized, by channel", weights))


def test_an_unset_order_of_compressed_tensors_is_ignored(tmp_path: Path) -> None:
    form = form_of(SYMMETRIC)
    held, expected = written(form)
    unset = torch.full(SHAPE[1:], -1, dtype=torch.int32)
    save_file(held | {"x.weight_g_idx": unset}, tmp_path / "model.safetensors")
    weight_format = read(with_weights(SYMMETRIC, {"actorder": "group"}))

    checkpoint = Checkpoint(tmp_path)
    found = read_matrix(checkpoint, weight_format, "x.weight", SHAPE, torch.float32, CPU)

    torch.testing.assert_close(dequantised(found, torch.float32), expected, rtol=1e-6, atol=0)


def test_codes_of_zero_that_contradict_symmetric_are_named(tmp_path: Path) -> None:
    form = form_of(SYMMETRIC)
    held, _ = written(form)
    form_told = read(dict(form.fields))

    def read_with(code_of_zero: int) -> None:
        zeros = torch.full((SHAPE[0], 6), code_of_zero, dtype=torch.int8)
        save_file(held | {"x.weight_zero_point": zeros}, tmp_path / "model.safetensors")
        read_matrix(Checkpoint(tmp_path), form_told, "x.weight", SHAPE, torch.float32, CPU)

    read_with(0)
    with pytest.raises(CheckpointError, match=r"weight_zero_point.*says symmetric"):
        read_with(1)
