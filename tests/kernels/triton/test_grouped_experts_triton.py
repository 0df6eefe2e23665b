"""The grouped experts' kernels against their reference."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.kernels import grouped_experts as reference
from moesaic.kernels.gated_mlp import PlainMLP
from moesaic.kernels.triton import grouped_experts as kernels
from moesaic.kernels.triton.expert_order import FEW, expert_order
from moesaic.kernels.triton.grouped_products import SlotWeights, grouped_products, tile_shapes
from moesaic.models.configuration.architecture import ClampedSwiglu

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def random_case(
    seed: int,
    num_rows: int,
    top_k: int,
    num_slots: int,
    hidden: int,
    size: int,
    device: str = "cpu",
) -> Case:
    """Inputs whose outputs are about 1; exact in bfloat16, so that all dtypes compute the same."""
    drawn = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, **drawn).bfloat16().float()

    slots = torch.rand(num_rows, num_slots + 2, **drawn).argsort(dim=1)[:, :top_k] - 2
    return (
        normal(num_rows, hidden),
        torch.rand(num_rows, top_k, **drawn),
        slots.clamp(min=-1),
        normal(num_slots, 2 * size, hidden) * 2.0 ** -round(hidden**0.5).bit_length(),
        normal(num_slots, hidden, size) * 2.0 ** -round(size**0.5).bit_length(),
    )


def grouped_experts(
    hidden: Tensor, weights: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """By the kernels, each slot's weights in tensors of their own."""
    experts = [PlainMLP(gate_up[slot].clone(), down[slot].clone()) for slot in range(len(down))]
    return kernels.grouped_experts(hidden, weights, slots, SlotWeights.of(experts))


def by_reference(
    hidden: Tensor, weights: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    experts = [PlainMLP(*pair) for pair in zip(gate_up, down, strict=True)]
    return reference.grouped_experts(hidden, weights, slots, experts)


def on(device: torch.device, case: Case, dtype: torch.dtype) -> Case:
    hidden, weights, slots, gate_up, down = (tensor.to(device) for tensor in case)
    return hidden.to(dtype), weights, slots, gate_up.to(dtype), down.to(dtype)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected.to(got.device)).norm() / expected.norm().clamp(min=1e-9))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_rows=st.integers(0, 9),
    top_k=st.integers(1, 4),
    num_slots=st.integers(4, 7),
    hidden=st.sampled_from([16, 40, 72]),
    size=st.sampled_from([16, 24, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example(0, 150, 2, 4, 72, 40, torch.bfloat16)  # blocks of 64 rows, the last of each slot ragged
@example(0, 300, 2, 2, 40, 24, torch.bfloat16)  # blocks of 128 rows
def test_it_equals_the_reference(
    device: torch.device,
    seed: int,
    num_rows: int,
    top_k: int,
    num_slots: int,
    hidden: int,
    size: int,
    dtype: torch.dtype,
) -> None:
    case = random_case(seed, num_rows, top_k, num_slots, hidden, size)

    combined = grouped_experts(*on(device, case, dtype))

    assert combined.dtype == torch.float32
    assert combined.shape == (num_rows, hidden)
    # In bfloat16 the activations and each expert's output are rounded, to 8 bits.
    tolerance = 1e-6 if dtype == torch.float32 else 6e-3
    assert relative_error(combined, by_reference(*case)) < tolerance


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    hidden=st.sampled_from([16, 40, 72]),
    size=st.sampled_from([16, 24, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_biases_and_the_clamped_activation(
    device: torch.device, seed: int, hidden: int, size: int, dtype: torch.dtype
) -> None:
    case = random_case(seed, 9, 2, 4, hidden, size)
    generator = torch.Generator().manual_seed(seed)
    biases = [
        tuple(torch.randn(n, generator=generator).bfloat16().float() for n in (2 * size, hidden))
        for _ in range(4)
    ]
    swiglu = ClampedSwiglu(1.702, 0.75)  # a limit that many meet
    mlps = [PlainMLP(*pair, both, swiglu) for *pair, both in zip(*case[3:], biases, strict=True)]  # type: ignore[arg-type]
    rows, weights, slots, gate_up, down = on(device, case, dtype)
    held = []
    for i in range(4):
        one, other = (each.to(device, dtype) for each in biases[i])
        held.append(PlainMLP(gate_up[i].clone(), down[i].clone(), (one, other), swiglu))

    got = kernels.grouped_experts(rows, weights, slots, SlotWeights.of(held))

    tolerance = 1e-6 if dtype == torch.float32 else 6e-3
    assert relative_error(got, reference.grouped_experts(*case[:3], mlps)) < tolerance


def test_rows_without_an_expert_here_are_zero(device: torch.device) -> None:
    case = random_case(0, 5, 2, 3, 16, 16)
    case[2][:] = -1
    assert not grouped_experts(*on(device, case, torch.bfloat16)).any()

    case[2][2, 1] = 0
    combined = grouped_experts(*on(device, case, torch.bfloat16))

    assert combined.any(dim=1).tolist() == [False, False, True, False, False]


def test_a_slot_may_be_empty(device: torch.device) -> None:
    hidden, weights, slots, gate_up, down = on(
        device, random_case(4, 6, 2, 3, 16, 16), torch.bfloat16
    )
    slots[slots == 1] = -1
    expected = grouped_experts(hidden, weights, slots, gate_up, down)

    experts = [PlainMLP(gate_up[0], down[0]), None, PlainMLP(gate_up[2], down[2])]
    got = kernels.grouped_experts(hidden, weights, slots, SlotWeights.of(experts))

    assert torch.equal(got, expected)


def test_the_order_of_a_rows_choices_does_not_matter(device: torch.device) -> None:
    hidden, weights, slots, gate_up, down = on(
        device, random_case(2, 6, 4, 5, 40, 24), torch.float32
    )

    whole = grouped_experts(hidden, weights, slots, gate_up, down)
    turned = grouped_experts(hidden, weights.flip(1), slots.flip(1), gate_up, down)

    assert torch.equal(whole, turned)


def test_few_choices_of_one_expert_fill_several_blocks_as_sorted_ones_do(
    device: torch.device,
) -> None:
    hidden, weights, slots, gate_up, down = on(
        device, random_case(5, 20, 2, 8, 40, 24), torch.bfloat16
    )
    # One row has the same expert twice, as united ones may be; one is not there, another one not here.
    slots[:], slots[3], slots[4] = 6, -1, 9
    slots[:2, 1] = 2
    held = SlotWeights.of([PlainMLP(*pair) for pair in zip(gate_up, down, strict=True)])
    assert slots.numel() <= FEW

    found = kernels.grouped_experts(hidden, weights, slots, held)

    tiles = tile_shapes(5, 40, 24, torch.bfloat16)
    order = expert_order(slots, 8, tiles[0].rows)
    each = grouped_products(hidden, held, order, 2, tiles).float()
    rows = order.row_of_choice.view(20, 2).long()
    expected = (each[rows.clamp(min=0)] * (weights * (rows >= 0)).unsqueeze(2)).sum(dim=1)
    assert relative_error(found, expected) < 1e-6
    assert not found[3:5].any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 8, 64, 300, 4096])
@pytest.mark.parametrize(
    ("top_k", "num_slots", "hidden", "size"),
    [(2, 8, 4096, 1792), (4, 60, 2048, 1408), (8, 128, 2048, 768), (6, 64, 2048, 1408)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_equals_the_reference_at_a_models_size(
    num_rows: int, top_k: int, num_slots: int, hidden: int, size: int, dtype: torch.dtype
) -> None:
    case = random_case(1, num_rows, top_k, num_slots, hidden, size, "cuda")

    combined = grouped_experts(*on(torch.device("cuda"), case, dtype))

    tolerance = 1e-5 if dtype == torch.float32 else 6e-3
    assert relative_error(combined, by_reference(*case)) < tolerance


@pytest.mark.gpu
def test_it_never_waits_for_the_device_and_repeats_bit_for_bit() -> None:
    drawn = random_case(3, 500, 8, 64, 1024, 512, "cuda")
    case = on(torch.device("cuda"), drawn, torch.bfloat16)
    hidden, weights, slots, gate_up, down = case
    experts = SlotWeights.of([PlainMLP(*pair) for pair in zip(gate_up, down, strict=True)])
    first = kernels.grouped_experts(hidden, weights, slots, experts)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [kernels.grouped_experts(hidden, weights, slots, experts) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert all(torch.equal(first, other) for other in again)
