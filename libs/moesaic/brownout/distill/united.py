"""One united expert, distilled from the experts of its group (BrownoutServe section IV-B).

The paper trains it towards each expert's output on all tokens. Here it learns what it will be asked for: of
the rows that the gate really sends to experts of the group, the gate-weighted sum of what those would
have said, for any of a row's choices that may be degraded together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

KEEP_SHARE = 0.6  # of a row's choices in the group, those that are degraded in one training step
WARM_UP = 0.1  # of the steps


@dataclass(frozen=True)
class Group:
    """The experts of a group, and the rows that its experts were chosen for.

    Attributes:
        gate_up: ``[w, 2I, H]``, gate before up.
        down: ``[w, H, I]``.
        inputs: float32 ``[n, H]``.
        weights: float32 ``[n, w]``: of the gate; 0 where a row did not choose the expert.
    """

    gate_up: Tensor
    down: Tensor
    inputs: Tensor
    weights: Tensor

    def outputs(self, rows: Tensor) -> Tensor:
        """What each expert says of some rows, float32 ``[m, w, H]``."""
        return torch.stack(
            [mlp(self.inputs[rows], *own) for own in zip(self.gate_up, self.down, strict=True)],
            dim=1,
        )


@dataclass(frozen=True)
class United:
    """One expert for a group.

    Attributes:
        gate_up: ``[2I, H]``.
        down: ``[H, I]``.
        error: held-out squared error over the squared length of what the group's experts would have said.
    """

    gate_up: Tensor
    down: Tensor
    error: float


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """A SwiGLU expert, ``[n, H]`` -> ``[n, H]``."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def mean_of(group: Group) -> tuple[Tensor, Tensor]:
    """Average the experts' weights by how much the gate asks of each; needs no training."""
    use = group.weights.sum(dim=0)
    share = (use / use.sum() if use.sum() > 0 else torch.full_like(use, 1 / len(use))).to(
        group.gate_up
    )
    return (
        torch.einsum("w,wih->ih", share, group.gate_up),
        torch.einsum("w,whi->hi", share, group.down),
    )


def busiest_units(group: Group) -> tuple[Tensor, Tensor]:
    """Compose one expert of those hidden units of all experts that contribute most to what rows get."""
    size = group.down.shape[2]
    contributions = []
    for gate_up, down, weights in zip(group.gate_up, group.down, group.weights.T, strict=True):
        rows = weights > 0
        gate, up = F.linear(group.inputs[rows], gate_up).chunk(2, dim=-1)
        active = F.silu(gate) * up * weights[rows].unsqueeze(1)
        contributions.append(active.square().sum(dim=0) * down.square().sum(dim=0))
    chosen = torch.cat(contributions).topk(size).indices
    gates, ups = group.gate_up[:, :size].flatten(0, 1), group.gate_up[:, size:].flatten(0, 1)
    downs = group.down.transpose(1, 2).flatten(0, 1)
    return torch.cat((gates[chosen], ups[chosen])), downs[chosen].T.contiguous()


def distil(group: Group, held_out: Group, steps: int, batch: int, rate: float, seed: int) -> United:
    """Train one expert, from the better of two beginnings; the same for a seed.

    Args:
        group: rows to learn from.
        held_out: others, to measure by.
        steps: of the optimizer.
        batch: rows of a step.
        rate: of learning, at its highest.
        seed: of what is drawn.
    """
    begun = [mean_of(group)] + ([busiest_units(group)] if len(group.inputs) else [])
    errors = [relative_error(held_out, *weights) for weights in begun]
    best = begun[errors.index(min(errors))]
    if not len(group.inputs):
        return United(*best, min(errors))
    generator = torch.Generator().manual_seed(seed)
    student = [weights.clone().requires_grad_() for weights in best]
    optimizer = torch.optim.Adam(student, lr=rate, betas=(0.9, 0.99))
    for step in range(steps):
        for own in optimizer.param_groups:
            own["lr"] = rate * _pace(step, steps)
        rows = torch.randint(len(group.inputs), (batch,), generator=generator)
        weights = group.weights[rows]
        some = torch.rand(weights.shape, generator=generator) < KEEP_SHARE
        some |= ~(some & (weights > 0)).any(dim=1, keepdim=True)  # one at least: else all
        weights = weights * some.to(weights)
        with torch.no_grad():
            wanted = torch.einsum("mw,mwh->mh", weights, group.outputs(rows))
        said = mlp(group.inputs[rows], *student) * weights.sum(dim=1, keepdim=True)
        loss = (said - wanted).square().sum() / wanted.square().sum().clamp(min=1e-12)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    gate_up, down = (weights.detach() for weights in student)
    return United(gate_up, down, relative_error(held_out, gate_up, down))


@torch.no_grad()
def relative_error(group: Group, gate_up: Tensor, down: Tensor) -> float:
    """Squared error of one expert for the group's rows, over the squared length of what they should get."""
    if not len(group.inputs):
        return 0.0
    wanted = torch.einsum(
        "mw,mwh->mh", group.weights, group.outputs(torch.arange(len(group.inputs)))
    )
    said = mlp(group.inputs, gate_up, down) * group.weights.sum(dim=1, keepdim=True)
    return float((said - wanted).square().sum() / wanted.square().sum().clamp(min=1e-12))


def _pace(step: int, steps: int) -> float:
    """Warm up, then fall to nothing."""
    warm = max(1, round(WARM_UP * steps))
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))
