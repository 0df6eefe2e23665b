"""The optimizer's updates are near orthogonal, and a run goes on from a file as if never stopped."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.training.evidence import LAYERS
from models.training.muon import Muon
from models.training.network import Network, Shape
from models.training.packs import NO_HINT
from models.training.state import Counters, load, save
from models.training.train import optimizer_of, step_loss

SHAPE = Shape(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    num_experts=4, top_k=2, expert_size=8, max_positions=64,
)  # fmt: skip
COUNTERS = Counters(step=3, tokens=96, seconds=1.5, loss=2.0, hints=None, letters=True)


def _update(gradient: Tensor, parts: int = 1) -> Tensor:
    """The first step's, of learning rate 1, on zeros."""
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    Muon([parameter], lr=1.0, parts=parts).step()
    return -parameter.detach()


@pytest.mark.parametrize("sizes", [(16, 48), (48, 16), (32, 32)])
def test_an_update_is_near_orthogonal(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    rows, columns = sizes

    values = torch.linalg.svdvals(_update(torch.randn(sizes))) / max(1.0, rows / columns) ** 0.5

    assert values.min() > 0.6
    assert values.max() < 1.3


def test_stacked_matrices_are_updated_as_each_alone() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(3, 16, 24)

    together = _update(gradient, parts=2)

    for whole, own in zip(gradient, together, strict=True):
        for part, found in zip(whole.chunk(2), own.chunk(2), strict=True):
            torch.testing.assert_close(found, _update(part))


def test_the_decay_is_apart_from_the_gradient() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.zeros(4, 4)
    Muon([parameter], lr=0.1, weight_decay=0.5).step()

    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), 0.95))


def _step(network: Network, optimizers: tuple[torch.optim.Optimizer, ...], seed: int) -> None:
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
    batch = {
        "tokens": tokens,
        "mask": torch.ones(16, 16).tril().bool().expand(2, 1, 16, 16),
        "positions": torch.arange(16).expand(2, 16),
        "weight": torch.ones(2, 16),
        "hint": torch.full((2, 16), NO_HINT),
        "subject": torch.full((2, 16), NO_HINT),
        "unlike": torch.zeros(0, 3, dtype=torch.int64),
        **{f"{kind}_rows": torch.zeros(0, 2, dtype=torch.int64) for kind in LAYERS},
    }
    losses = step_loss(network, batch)
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert math.isnan(losses.hints)
    assert math.isnan(losses.told)
    losses.total.backward()
    for optimizer in optimizers:
        optimizer.step()


def test_a_resumed_run_has_the_same_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Network(SHAPE)
    optimizers = optimizer_of(network)
    for seed in range(3):
        _step(network, optimizers, seed)
    save(tmp_path / "state.safetensors", network, optimizers, COUNTERS)
    torch.manual_seed(1)
    resumed = Network(SHAPE)
    resumed_optimizers = optimizer_of(resumed)

    assert load(tmp_path / "state.safetensors", resumed, resumed_optimizers) == COUNTERS
    for seed in range(3, 5):
        _step(network, optimizers, seed)
        _step(resumed, resumed_optimizers, seed)

    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
