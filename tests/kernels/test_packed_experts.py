"""The CPU's kernel of grouped experts against float64, one expert at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.gated_mlp import PlainMLP, make_mlp
from moesaic.kernels.grouped_experts import grouped_experts
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.packed_experts import PackedMLP, PackedSlots
from moesaic.models.configuration.architecture import ClampedSwiglu

pytestmark = pytest.mark.usefixtures("native")


def random_case(
    seed: int, num_tokens: int, top_k: int, num_slots: int, hidden: int = 40, size: int = 24
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, hidden, generator=generator),
        torch.rand(num_tokens, top_k, generator=generator),
        torch.randint(-1, num_slots, (num_tokens, top_k), generator=generator).int(),
        torch.randn(num_slots, 2 * size, hidden, generator=generator) / hidden**0.5,
        torch.randn(num_slots, hidden, size, generator=generator) / size**0.5,
    )


def packed(gate_up: Tensor, down: Tensor, quantization: Quantization = "none") -> PackedSlots:
    pairs = zip(gate_up, down, strict=True)
    return PackedSlots([PackedMLP(*pair, quantization) for pair in pairs])


def clamped(
    case: tuple[Tensor, ...], seed: int, quantization: Quantization = "none"
) -> tuple[PackedSlots, list[PlainMLP]]:
    """The case's experts with biases and a limit that about every second number meets; in float64 too."""
    generator = torch.Generator().manual_seed(seed)
    swiglu, ours, exact = ClampedSwiglu(1.702, 0.7), [], []
    for gate_up, down in zip(*case[3:], strict=True):
        biases = tuple(torch.randn(len(weight), generator=generator) for weight in (gate_up, down))
        made = {"biases": biases, "activation": swiglu}
        ours.append(PackedMLP(gate_up, down, quantization, **made))  # type: ignore[arg-type]
        doubled = (biases[0].double(), biases[1].double())
        exact.append(PlainMLP(gate_up.double(), down.double(), doubled, swiglu))
    return PackedSlots(ours), exact


def by_hand(x: Tensor, mlp: PlainMLP) -> Tensor:
    """As gpt-oss's code says it."""
    assert mlp.biases is not None
    assert mlp.activation is not None
    slope, limit = mlp.activation
    gate, up = (mlp.gate_up @ x + mlp.biases[0]).chunk(2)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return mlp.down @ ((up + 1) * gate * torch.sigmoid(slope * gate)) + mlp.biases[1]


def exact(case: tuple[Tensor, ...], mlps: list[PlainMLP] | None = None) -> Tensor:
    """In float64, one choice at a time, with experts that have only weights if none are given."""
    hidden, weights, slots, gate_up, down = case
    expected = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, choices in enumerate(slots.tolist()):
        x = hidden[token].double()
        for choice, slot in enumerate(choices):
            if slot < 0:
                continue
            if mlps is not None:
                said = by_hand(x, mlps[slot])
            else:
                gate, up = (gate_up[slot].double() @ x).chunk(2)
                said = down[slot].double() @ (F.silu(gate) * up)
            expected[token] += weights[token, choice].double() * said
    return expected


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(0, 120),
    top_k=st.integers(1, 5),
    num_slots=st.integers(1, 6),
    hidden=st.integers(1, 150),
    size=st.integers(1, 90),
)
def test_it_equals_one_expert_at_a_time(
    seed: int, num_tokens: int, top_k: int, num_slots: int, hidden: int, size: int
) -> None:
    case = random_case(seed, num_tokens, top_k, num_slots, hidden, size)

    combined = packed(*case[3:]).compute(*case[:3])

    torch.testing.assert_close(combined, exact(case).float(), atol=2e-5, rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_tokens=st.integers(0, 60),
    top_k=st.integers(1, 5),
    num_slots=st.integers(1, 6),
    hidden=st.integers(1, 150),
    size=st.integers(1, 90),
)
def test_biases_and_the_clamped_activation_are_exact(
    seed: int, num_tokens: int, top_k: int, num_slots: int, hidden: int, size: int
) -> None:
    case = random_case(seed, num_tokens, top_k, num_slots, hidden, size)
    experts, mlps = clamped(case, seed)

    combined = experts.compute(*case[:3])

    expected = exact(case, mlps)
    torch.testing.assert_close(combined.double(), expected, atol=2e-5, rtol=1e-4)
    for mlp in mlps:
        by_torch = mlp(case[0].double())
        for row, x in zip(by_torch, case[0].double(), strict=True):
            torch.testing.assert_close(row, by_hand(x, mlp))


def test_int8_keeps_biases_and_the_clamped_activation() -> None:
    case = random_case(1, 40, 2, 4, 100, 60)
    experts, mlps = clamped(case, 1, "int8")

    expected = exact(case, mlps)

    assert (experts.compute(*case[:3]) - expected).norm() <= 0.03 * expected.norm()


def test_a_number_that_is_none_is_not_clamped() -> None:
    case = random_case(6, 3, 1, 1)
    case[2].clamp_(min=0)
    experts, _ = clamped(case, 6)
    case[0][1, 5] = float("nan")

    out = experts.compute(*case[:3])

    assert out.isnan().all(dim=1).tolist() == [False, True, False]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(1, 70))
def test_int8_stays_within_a_few_per_cent(seed: int, num_tokens: int) -> None:
    case = random_case(seed, num_tokens, 2, 4, 100, 60)
    expected = exact(case)

    combined = packed(*case[3:], quantization="int8").compute(*case[:3])

    assert (combined - expected).norm() <= 0.03 * expected.norm() + 1e-6


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(quantization: Quantization) -> None:
    hidden, weights, slots, gate_up, down = random_case(3, 300, 4, 7)
    experts = packed(gate_up, down, quantization)
    together = experts.compute(hidden, weights, slots)

    for part in (slice(0, 1), slice(5, 7), slice(40, 90), slice(0, 299)):
        alone = experts.compute(hidden[part], weights[part], slots[part])
        assert torch.equal(alone, together[part])


def test_the_order_of_a_rows_choices_does_not_matter() -> None:
    hidden, weights, _, gate_up, down = random_case(2, 6, 4, 5)
    shuffled = [torch.randperm(5, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    slots = torch.stack([order[:4] for order in shuffled]).int()
    experts = packed(gate_up, down)

    whole = experts.compute(hidden, weights, slots)
    turned = experts.compute(hidden, weights.flip(1), slots.flip(1))

    assert torch.equal(whole, turned)


def test_slots_without_an_expert_are_never_read() -> None:
    hidden, weights, slots, gate_up, down = random_case(4, 20, 2, 3)
    slots[slots == 1] = -1
    mlps = [PackedMLP(gate_up[0], down[0]), None, PackedMLP(gate_up[2], down[2])]

    combined = PackedSlots(mlps).compute(hidden, weights, slots)

    expected = exact((hidden, weights, slots, gate_up, down)).float()
    torch.testing.assert_close(combined, expected, atol=2e-5, rtol=1e-4)


def test_numbers_beyond_the_range_of_exponentials_are_activated_as_torch_does() -> None:
    hidden, weights, slots, gate_up, down = random_case(5, 8, 1, 2)
    slots.clamp_(min=0)
    hidden *= 10.0 ** torch.arange(-3, 5).unsqueeze(1)  # gates up to about 3e4, of either sign
    plain = [PlainMLP(*pair) for pair in zip(gate_up, down, strict=True)]

    combined = packed(gate_up, down).compute(hidden, weights, slots)

    expected = grouped_experts(hidden, weights, slots, plain)
    torch.testing.assert_close(combined, expected, atol=1e-5, rtol=1e-4)


def test_a_number_that_is_none_stays_in_its_row() -> None:
    hidden, weights, slots, gate_up, down = random_case(6, 9, 2, 2)
    slots.clamp_(min=0)
    experts = packed(gate_up, down)
    expected = experts.compute(hidden, weights, slots)
    hidden[4, 7] = float("nan")

    out = experts.compute(hidden, weights, slots)

    assert out[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(out[others], expected[others])


def test_an_mlp_is_one_expert_of_every_row() -> None:
    hidden, _, _, gate_up, down = random_case(7, 33, 1, 1)

    out = make_mlp(gate_up[0], down[0])(hidden)

    torch.testing.assert_close(out, PlainMLP(gate_up[0], down[0])(hidden), atol=2e-5, rtol=1e-4)
