"""One united expert, distilled from the experts of its group (BrownoutServe section IV-B).

The paper trains it towards each expert's output on all tokens. Here it learns from rows that the gate really sends
to experts of the group. Its target is the sum of their outputs, weighted by the gate, for any of a row's choices
that may be degraded together.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from moesaic_lab.distillation.recipe import Recipe, pace, rates

DEGRADED_SHARE = 0.6  # of a row's choices in the group, in one step of training
LOOKED_AT = 4096  # rows that units are chosen by, at most
_CHUNK = 1024  # rows that are measured at once


@dataclass(frozen=True)
class Group:
    """The experts of a group, and rows for which the gate chose any of them.

    Attributes:
        gate_up: float32 ``[w, 2I, H]``, gate before up.
        down: float32 ``[w, H, I]``.
        inputs: float32 ``[N, H]``, of the layer's experts; may lie in a file.
        rows: int64 ``[n]``, indices of ``inputs``.
        weights: float32 ``[n, w]``, of the gate; 0 where a row did not choose the expert.
    """

    gate_up: Tensor
    down: Tensor
    inputs: NDArray[np.float32]
    rows: NDArray[np.int64]
    weights: Tensor

    def inputs_of(self, some: Tensor) -> Tensor:
        """Read the inputs of some rows, int64 ``[m]`` in ``0..n-1``, as float32 ``[m, H]``."""
        return torch.from_numpy(self.inputs[self.rows[some.numpy()]])

    def said(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """Sum up what the experts say of ``inputs`` ``[m, H]``, by ``weights`` ``[m, w]``; ``[m, H]``."""
        out = torch.zeros_like(inputs)
        for expert, own in enumerate(zip(self.gate_up, self.down, strict=True)):
            rows = weights[:, expert].nonzero().squeeze(1)
            out.index_add_(0, rows, mlp(inputs[rows], *own) * weights[rows, expert, None])
        return out

    def relative_error(self, gate_up: Tensor, down: Tensor) -> float | None:
        """Measure one expert, ``[2I, H]`` and ``[H, I]``, that serves every choice of the rows.

        Returns:
            Its squared error over the squared length of what the group's experts say; None: nothing is said.
        """
        error = length = 0.0
        for some in torch.split(torch.arange(len(self.rows)), _CHUNK):
            inputs, weights = self.inputs_of(some), self.weights[some]
            said = self.said(inputs, weights)
            off = mlp(inputs, gate_up, down) * weights.sum(dim=1, keepdim=True) - said
            error += float(off.double().square().sum())
            length += float(said.double().square().sum())
        return error / length if length else None


@dataclass(frozen=True)
class UnitedExpert:
    """One expert for a group.

    Attributes:
        gate_up: ``[2I, H]``, of the dtype that is stored.
        down: ``[H, I]``.
        error: relative, of rows held out; None: the gate sends none of them here.
        mean_error: the same of the mean of the group's weights, which needs no training.
    """

    gate_up: Tensor
    down: Tensor
    error: float | None
    mean_error: float | None


def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute a SwiGLU expert, ``[n, H]`` -> ``[n, H]``."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def mean_of(group: Group) -> tuple[Tensor, Tensor]:
    """Average the experts' weights by how much the gate asks of each; needs no training."""
    use = group.weights.sum(dim=0)
    share = use / use.sum() if use.sum() > 0 else torch.full_like(use, 1 / len(use))
    return (
        torch.einsum("w,wih->ih", share, group.gate_up),
        torch.einsum("w,whi->hi", share, group.down),
    )


def busiest_units(group: Group) -> tuple[Tensor, Tensor]:
    """Compose one expert of those hidden units of all experts that contribute most to what rows get."""
    size = group.down.shape[2]
    some = torch.arange(min(len(group.rows), LOOKED_AT))
    inputs, contributions = group.inputs_of(some), []
    for gate_up, down, weights in zip(
        group.gate_up, group.down, group.weights[some].T, strict=True
    ):
        gate, up = F.linear(inputs, gate_up).chunk(2, dim=-1)
        active = F.silu(gate) * up * weights.unsqueeze(1)
        contributions.append(active.square().sum(dim=0) * down.square().sum(dim=0))
    chosen = torch.cat(contributions).topk(size).indices
    gates, ups = group.gate_up[:, :size].flatten(0, 1), group.gate_up[:, size:].flatten(0, 1)
    downs = group.down.transpose(1, 2).flatten(0, 1)
    return torch.cat((gates[chosen], ups[chosen])), downs[chosen].T.contiguous()


def distil(
    group: Group, held_out: Group, recipe: Recipe, seed: int, dtype: torch.dtype
) -> UnitedExpert:
    """Train one expert from the better of two beginnings, the same for a seed.

    Args:
        group: rows to learn from.
        held_out: rows to measure by.
        recipe: of training.
        seed: of what is drawn.
        dtype: that it is stored in; what is measured is stored.
    """

    def measured(weights: tuple[Tensor, Tensor]) -> float | None:
        return held_out.relative_error(*(part.to(dtype).float() for part in weights))

    mean = mean_of(group)
    made = [(mean, measured(mean))]
    if len(group.rows):
        units = busiest_units(group)
        made.append((units, measured(units)))
        trained = _trained(group, min(made, key=_badness)[0], recipe, seed)
        made.append((trained, measured(trained)))
    # Too few rows can teach what is wrong elsewhere.
    (gate_up, down), error = min(made[::-1], key=_badness)
    return UnitedExpert(gate_up.to(dtype), down.to(dtype), error, made[0][1])


def _badness(made: tuple[tuple[Tensor, Tensor], float | None]) -> float:
    return made[1] or 0.0


def _trained(
    group: Group, begun: tuple[Tensor, Tensor], recipe: Recipe, seed: int
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student = [weights.clone().requires_grad_() for weights in begun]
    optimizer = torch.optim.Adam(rates(student, recipe.rate), betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: pace(step, recipe.steps))
    for _ in range(recipe.steps):
        some = torch.randint(len(group.rows), (recipe.batch,), generator=generator)
        inputs, weights = group.inputs_of(some), group.weights[some]
        going = torch.rand(weights.shape, generator=generator) < DEGRADED_SHARE
        # One at least: else all.
        going |= ~(going & (weights > 0)).any(dim=1, keepdim=True)
        weights = weights * going
        said = group.said(inputs, weights)
        off = mlp(inputs, *student) * weights.sum(dim=1, keepdim=True) - said
        loss = off.square().sum() / said.square().sum().clamp(min=1e-12)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        optimizer.step()
        schedule.step()
    gate_up, down = (weights.detach() for weights in student)
    return gate_up, down
