"""The same bytes as transformers, and the libraries that write the formats, understand them."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from benchmarks.parity.cases import CPU
from benchmarks.parity.published import FORMS, Published
from moesaic.kernels.stored_weights import Fp8Weight, Int4Weight, dequantised
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.weight_format import WeightFormat, read_weight_format
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats.mxfp4 import read_entry
from moesaic.models.weights.formats.reading import read_matrix
from tests.models.weights.formats.conftest import form_of

WRITTEN = Path(__file__).parent / "written.safetensors"
ROWS = [0, 9, 18, 31]  # of which the file holds the numbers


@pytest.mark.parametrize(
    ("name", "weight_format"),
    [
        ("packed.sym", WeightFormat("pack-quantized", 4, 32)),
        ("packed", WeightFormat("pack-quantized", 4, 32, zeros=True)),
        ("gptq.sym", WeightFormat("gptq", 4, 32, zero_offset=1)),
        ("gptq", WeightFormat("gptq", 4, 32, zeros=True, zero_offset=1)),
        ("awq", WeightFormat("awq", 4, 32, zeros=True)),
    ],
)
def test_what_the_formats_own_libraries_wrote_is_read(
    tmp_path: Path, name: str, weight_format: WeightFormat
) -> None:
    """compressed-tensors 0.20, auto-gptq 0.7.1 and autoawq 0.2.6 packed a matrix and read it again."""
    (tmp_path / "model.safetensors").write_bytes(WRITTEN.read_bytes())

    weight = read_matrix(
        Checkpoint(tmp_path), weight_format, f"{name}.weight", (32, 64), torch.float32, CPU
    )

    assert isinstance(weight, Int4Weight)
    expected = load_file(WRITTEN)[f"{name}.expected"]
    found = dequantised(weight, torch.float32)[ROWS]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 255, (3, 40, 5), dtype=torch.uint8, generator=generator)
    scales[0, 0] = torch.tensor([0, 1, 126, 127, 250])  # the last can be doubled twice
    scales.clamp_(max=250)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")

    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)

    for expert in range(3):
        found = read_entry(Checkpoint(tmp_path), "x", expert, 3, 40, 160)
        # Theirs lie the other way round.
        assert torch.equal(dequantised(found, torch.float32), expected[expert].t())


def test_fp8_in_blocks_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = torch.Generator().manual_seed(4)
    codes = torch.randn(256, 384, generator=generator).mul(99).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=generator)
    tensors = {"x.weight": codes, "x.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    format_of = WeightFormat("fp8", 8, 128, 128, "weight_scale_inv")

    found = read_matrix(Checkpoint(tmp_path), format_of, "x.weight", (256, 384), torch.float32, CPU)

    assert isinstance(found, Fp8Weight)
    reader = Fp8Dequantize(SimpleNamespace())  # type: ignore[no-untyped-call]  # untyped there
    reference = reader.convert({"weight": codes, "weight_scale_inv": scales})["weight"]
    assert torch.equal(dequantised(found, torch.float32), reference)


@settings(max_examples=60)
@example(form_of("pack-quantized, 4 bits, groups of 32, with"), 1, 3, 0)
@given(
    st.sampled_from([form for form in FORMS if not form.fused]),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 10**6),
)
def test_matrices_of_any_size_have_the_numbers_of_their_format(
    tmp_path_factory: pytest.TempPathFactory, form: Published, eights: int, groups: int, seed: int
) -> None:
    chance, shape = np.random.default_rng(seed), (8 * eights, 32 * groups)
    tensors, values = form.write(chance.normal(size=shape), chance)
    directory = tmp_path_factory.mktemp("one")
    held = {f"x.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, directory / "model.safetensors")
    told = Fields("config.json", {"quantization_config": dict(form.fields)})

    found = read_matrix(
        Checkpoint(directory), read_weight_format(told), "x.weight", shape, torch.float32, CPU
    )

    numbers = dequantised(found, torch.float32)
    torch.testing.assert_close(numbers, torch.from_numpy(values).float(), rtol=1e-6, atol=0)
