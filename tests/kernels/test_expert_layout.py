"""Packed bytes compute as the expert that they were packed from, bit for bit, wherever they lie."""

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.kernels.expert_layout import ExpertLayout
from moesaic.kernels.gated_mlp import PlainMLP, make_mlp
from moesaic.kernels.held_bytes import WeightForm, held_bytes
from moesaic.kernels.stored_weights import Int4Weight
from moesaic.models.configuration.architecture import ClampedSwiglu
from moesaic.native.library import library

FORMS = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    (torch.float16, "none"),
    (torch.float32, "int8"),
    (torch.bfloat16, "int4"),
]


@settings(deadline=None, max_examples=40)
@given(
    hidden=st.integers(1, 80),
    size=st.integers(1, 80),
    form=st.sampled_from(FORMS if library() else FORMS[:1]),
    seed=st.integers(0, 999),
    biased=st.booleans(),
    activation=st.sampled_from([None, ClampedSwiglu(1.702, 0.9)]),
)
def test_it_computes_the_same_bits(
    hidden: int, size: int, form: Any, seed: int, biased: bool, activation: ClampedSwiglu | None
) -> None:
    dtype, quantization = form
    generator = torch.Generator().manual_seed(seed)
    gate_up, down, x = (
        torch.randn(shape, generator=generator)
        for shape in ((2 * size, hidden), (hidden, size), (5, hidden))
    )
    of_gate_up, of_down = (
        torch.randn(count, generator=generator).to(dtype) for count in (2 * size, hidden)
    )
    biases = (of_gate_up, of_down) if biased else None
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    layout = ExpertLayout(hidden, size, dtype, quantization, biased=biased, activation=activation)
    memory = torch.empty(3, layout.nbytes, dtype=torch.uint8)

    layout.pack(gate_up, down, memory[1], biases)
    memory[2] = memory[1]

    expected = make_mlp(gate_up, down, quantization, biases=biases, activation=activation)(x)
    assert torch.equal(layout.view(memory[1])(x), expected)
    assert torch.equal(layout.view(memory[2])(x), expected)
    assert layout.nbytes % 64 == 0


def test_for_a_gpu_weights_keep_their_form() -> None:
    gate_up, down, x = torch.randn(32, 24), torch.randn(24, 16), torch.randn(3, 24)
    layout = ExpertLayout(24, 16, torch.float32, as_stored=True)
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)

    layout.pack(gate_up, down, packed)

    mlp = layout.view(packed)
    assert isinstance(mlp, PlainMLP)
    assert torch.equal(mlp.gate_up, gate_up)
    assert torch.equal(mlp.down, down)
    assert torch.equal(mlp(x), PlainMLP(gate_up, down)(x))
    if library():
        assert layout.name != ExpertLayout(24, 16, torch.float32).name


def test_for_a_gpu_biases_keep_their_form() -> None:
    gate_up, down, biases = torch.randn(6, 5), torch.randn(5, 3), (torch.randn(6), torch.randn(5))
    activation = ClampedSwiglu(1.5, 2.0)
    layout = ExpertLayout(5, 3, torch.float32, "none", True, True, activation)
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8)

    layout.pack(gate_up, down, packed, biases)

    mlp = layout.view(packed)
    assert isinstance(mlp, PlainMLP)
    assert mlp.biases is not None
    assert mlp.activation == activation
    assert all(map(torch.equal, mlp.biases, biases))
    assert all(bias.data_ptr() % 16 == packed.data_ptr() % 16 for bias in mlp.biases)
    assert layout.name != ExpertLayout(5, 3, torch.float32, as_stored=True).name


def test_names_differ_where_bytes_mean_something_else() -> None:
    forms = FORMS if library() else FORMS[:1]
    names = {ExpertLayout(h, s, *form).name for h, s in ((512, 256), (256, 512)) for form in forms}

    assert len(names) == 2 * len(forms)


def test_codes_for_a_gpu_have_names_and_bytes_of_their_own() -> None:
    forms = [WeightForm("fp8", 128), WeightForm("int4", 128), WeightForm("int4", 128, zeros=True)]
    forms.append(WeightForm("int4", 128, levels=True))
    on_gpu = [
        ExpertLayout(512, 256, torch.bfloat16, as_stored=True, codes=c) for c in (None, *forms)
    ]

    assert len({layout.name for layout in on_gpu}) == len(on_gpu)
    shapes = (512, 512), (512, 256)
    for form, layout in zip(forms, on_gpu[1:], strict=True):
        assert layout.nbytes == sum(held_bytes(shape, form) for shape in shapes)
    if library():
        on_cpu = {ExpertLayout(512, 256, torch.bfloat16, codes=form).name for form in forms}
        assert not on_cpu & {layout.name for layout in on_gpu}


# By what a layout's name says of the build: a digest of the bytes that experts of all forms are packed to. Files of
# packed experts, and those of a colleague, are taken by that name, so other bytes need another name.
PACKED = {
    "panels of 64, vectors of 16": "4e84414c2fc3b655",
    "panels of 16, vectors of 8": "0bde05a6ae85034b",
    "panels of 16, vectors of 4": "87e96a6c3cc78362",
}


@pytest.mark.skipif(library() is None, reason="there is no C compiler")
def test_what_is_packed_under_a_name_stays_the_same() -> None:
    digest = hashlib.sha256()
    # No random numbers: torch draws others on other processors.
    gate_up, down = (
        ((torch.arange(rows * columns) * 37 % 101 - 50) / 64).reshape(rows, columns)
        for rows, columns in ((256, 64), (64, 128))
    )
    published = ExpertLayout(64, 128, torch.float32, codes=WeightForm("int4", 128))
    codes = Int4Weight.of(gate_up, 128), Int4Weight.of(down, 128)
    experts = [(ExpertLayout(64, 128, *form), (gate_up, down)) for form in FORMS]
    builds = set()
    for layout, weights in [*experts, (published, codes)]:
        packed = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.pack(*weights, packed)
        digest.update(packed.numpy())
        builds.add(layout.name.partition(", ")[2].partition(":")[0])

    (build,) = builds
    assert digest.hexdigest()[:16] == PACKED[build]


@pytest.mark.skipif(library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_numbers_as_files_have_them_are_packed_as_the_same_float32(
    stored: torch.dtype, form: Any
) -> None:
    layout = ExpertLayout(50, 30, *form, biased=True)
    assert layout.packs_stored == (form in [(torch.float32, "none"), (torch.float32, "int8")])
    if not layout.packs_stored:
        return
    shapes = (60, 50), (50, 30), (60,), (50,)
    tensors = [torch.randn(shape).to(stored) for shape in shapes]
    packed = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    for row, (gate_up, down, *biases) in zip(
        packed, (tensors, [tensor.float() for tensor in tensors]), strict=True
    ):
        layout.pack(gate_up, down, row, (biases[0], biases[1]))
    assert torch.equal(packed[0], packed[1])
