"""The basis on which all workers assign a batch's experts alike; it goes with the rows."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.messages.scheduling import SCHEDULINGS, ExpertScheduling
from moesaic.plugins import plugins

MAX_LOAD = 1 << 40


@dataclass(frozen=True)
class AssignmentBasis:
    """Facts about one layer and one batch that decide which worker computes which experts."""

    scheduling: ExpertScheduling
    live: tuple[int, ...]  # indices of the placement's workers that may serve, ascending
    load: tuple[int, ...] | None = None  # of each of them; None: they have nothing else to do

    def encode(self) -> Tensor:
        """Write int64 ``[1, 1 + n]``: the policy's code, then the live workers.

        Loads make a second row: 0, then the load of each.
        """
        rows = [[all_schedulings().index(self.scheduling), *self.live]]
        if self.load is not None:
            rows.append([0, *self.load])
        return torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def decode(cls, encoded: Tensor, num_workers: int) -> "AssignmentBasis":
        """Read the tensor that ``encode`` has written, for a placement of ``num_workers``.

        Raises:
            InvalidInput: it is something else.
        """
        if encoded.dtype != torch.int64 or encoded.dim() != 2 or len(encoded) not in (1, 2):
            raise _malformed(f"be int64 of one or two rows, got {_described(encoded)}")
        if encoded.shape[1] < 2:
            raise _malformed(f"name a worker, got {_described(encoded)}")
        (code, *live), *more = encoded.tolist()
        schedulings = all_schedulings()
        if not 0 <= code < len(schedulings):
            raise _malformed(f"begin with a policy, 0..{len(schedulings) - 1}, got {code}")
        if any(a >= b for a, b in zip([-1, *live], [*live, num_workers], strict=True)):
            raise _malformed(f"name some of {num_workers} workers in ascending order, got {live}")
        if not more:
            return cls(schedulings[code], tuple(live))
        zero, *load = more[0]
        if zero or not all(0 <= each <= MAX_LOAD for each in load):
            raise _malformed(f"have loads in 0..{MAX_LOAD} behind a 0, got {more[0]}")
        return cls(schedulings[code], tuple(live), tuple(load))


@cache
def all_schedulings() -> tuple[ExpertScheduling, ...]:
    """List all that can be asked for, in the order of their codes.

    Workers that have other plugins take a code for another scheduling; their digests of decisions then differ.
    """
    return (*SCHEDULINGS, *plugins("expert_schedulings"))


def _malformed(expected: str) -> InvalidInput:
    return InvalidInput("frame.tensors[1]", f"must {expected}")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
