"""The recipe of a distillation, and what it says of its progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """The way united experts are trained. Another recipe makes other experts.

    Attributes:
        steps: of each united expert, on the rows of its layer; 0: they begin as others ended.
        batch: rows of such a step.
        rate: of learning at its highest, as a share of the weights' root mean square.
        joint_steps: of all united experts of one way together, towards the whole model's answers; 0: none.
        joint_tokens: of such a step, about.
        joint_rate: as ``rate``, in these.
        joint_threshold: share of a sequence's choices whose experts stay, in half of these steps; None: drawn anew.
        seed: of all that is drawn.
    """

    steps: int = 600
    batch: int = 256
    rate: float = 0.03
    joint_steps: int = 0
    joint_tokens: int = 1024
    joint_rate: float = 0.01
    joint_threshold: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class DistillProgress:
    """A piece of work is done.

    Attributes:
        stage: of the work.
        done: pieces of this stage.
        total: pieces of this stage.
        note: figures of the piece, for people; empty: there are none.
    """

    stage: str
    done: int
    total: int
    note: str = ""


def pace(step: int, steps: int) -> float:
    """Scale the rate of a step from 0: up over a tenth of all steps, then down to nothing."""
    warm = max(1, steps // 10)
    return min((step + 1) / warm, (steps - step) / max(1, steps - warm))


def rates(parameters: Sequence[Tensor], rate: float) -> list[dict[str, Any]]:
    """Give each tensor a group of an optimizer whose rate is a share of its root mean square."""
    return [
        {"params": [own], "lr": rate * float(own.detach().square().mean().sqrt())}
        for own in parameters
    ]
