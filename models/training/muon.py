"""Muon: momentum whose update is orthogonalised, for the matrices inside a network."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring all singular values close to 1, and keep the singular vectors.

    The quintic of each Newton-Schulz step lifts small values fast; it leaves them between about 0.7
    and 1.2 instead of converging, which serves an update as well.

    Args:
        matrices: float32 ``[B, rows, columns]``, with ``rows <= columns`` for speed.
    """
    a, b, c = COEFFICIENTS
    x: Tensor = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    A parameter ``[..., rows, columns]`` is a batch of matrices. In a group with ``parts`` above 1,
    each of them is that many matrices one below the other.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        parts: int = 1,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": parts}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("Muon evaluates no closure")
        # Matrices of one shape, of whatever parameters, go through one batched iteration: many small
        # products would not fill the cores.
        waiting: dict[tuple[int, ...], list[tuple[Tensor, Tensor, float]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(momentum, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rows, columns = parameter.shape[-2] // group["parts"], parameter.shape[-1]
                matrices, update = (t.view(-1, rows, columns) for t in (parameter.data, update))
                step = -group["lr"] * max(1.0, rows / columns) ** 0.5
                if rows > columns:
                    matrices, update = matrices.mT, update.mT
                waiting.setdefault(tuple(update.shape[1:]), []).append((matrices, update, step))
        for entries in waiting.values():
            updates = orthogonalise(torch.cat([update for _, update, _ in entries]))
            sizes = [len(matrices) for matrices, _, _ in entries]
            for (matrices, _, step), update in zip(
                entries, torch.split(updates, sizes), strict=True
            ):
                matrices.add_(update, alpha=step)
