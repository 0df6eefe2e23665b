"""What a request says beside its rows, so that all workers share out the experts alike: by which
policy, among whom, and what these still have to do."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import InvalidInput
from moesaic.messages.scheduling import POLICIES, ExpertScheduling

MAX_LOAD = 1 << 40


@dataclass(frozen=True)
class Terms:
    """How the experts of one layer are shared out for one batch."""

    scheduling: ExpertScheduling
    live: tuple[int, ...]  # indices of the placement's workers that may serve, ascending
    load: tuple[int, ...] | None = None  # of each of them; None: nobody has to do anything else

    def encode(self) -> Tensor:
        """As int64 ``[1, 1 + n]``: the policy's code, who lives; the loads behind a 0 make a second
        row."""
        rows = [[POLICIES.index(self.scheduling), *self.live]]
        if self.load is not None:
            rows.append([0, *self.load])
        return torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def decode(cls, encoded: Tensor, num_workers: int) -> "Terms":
        """Read what ``encode`` has written, for a placement of ``num_workers``.

        Raises:
            InvalidInput: it is something else.
        """
        if encoded.dtype != torch.int64 or encoded.dim() != 2 or len(encoded) not in (1, 2):
            raise _malformed(f"be int64 of one or two rows, got {_described(encoded)}")
        if encoded.shape[1] < 2:
            raise _malformed(f"name a worker, got {_described(encoded)}")
        (code, *live), *more = encoded.tolist()
        if not 0 <= code < len(POLICIES):
            raise _malformed(f"begin with a policy, 0..{len(POLICIES) - 1}, got {code}")
        if any(a >= b for a, b in zip([-1, *live], [*live, num_workers], strict=True)):
            raise _malformed(f"name some of {num_workers} workers in ascending order, got {live}")
        if not more:
            return cls(POLICIES[code], tuple(live))
        zero, *load = more[0]
        if zero or not all(0 <= each <= MAX_LOAD for each in load):
            raise _malformed(f"have loads in 0..{MAX_LOAD} behind a 0, got {more[0]}")
        return cls(POLICIES[code], tuple(live), tuple(load))


def _malformed(expected: str) -> InvalidInput:
    return InvalidInput("frame.tensors[1]", f"must {expected}")


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
