"""``torch.distributed`` between threads: NCCL is not here, and gloo takes no tensors of the fake device."""

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.waiting import HANG_S


class Threads:
    """As much of ``torch.distributed`` as ``RankGroup`` uses; each thread is one rank.

    All ranks of a collective must use one kind of device, as with NCCL and gloo.
    """

    def __init__(self, ranks: int) -> None:
        """Connect the first rank with each of the others."""
        self._rank = threading.local()
        self._down: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(ranks)]
        self._up: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(ranks)]
        self._ranks = ranks

    def init_process_group(self, backend: str, *, rank: int, **_: Any) -> None:
        """Note this thread's rank."""
        assert "nccl" in backend
        self._rank.value = rank

    def destroy_process_group(self) -> None:
        """Do nothing."""

    def broadcast(self, tensor: Tensor, _: int) -> None:
        """See ``torch.distributed``."""
        if self._rank.value:
            tensor.copy_(_alike(self._down[self._rank.value].get(timeout=HANG_S), tensor))
            return
        for rank in range(1, self._ranks):
            self._down[rank].put(tensor.clone())

    def reduce(self, part: Tensor, _: int) -> None:
        """See ``torch.distributed``."""
        self._bring(part, lambda _, other: part.add_(other))

    def gather(self, part: Tensor, parts: list[Tensor] | None, _: int) -> None:
        """See ``torch.distributed``."""
        if parts is not None:
            parts[0].copy_(part)
        self._bring(part, lambda rank, other: (parts or [])[rank].copy_(other))

    def _bring(self, part: Tensor, take: Callable[[int, Tensor], object]) -> None:
        if self._rank.value:
            self._up[self._rank.value].put(part.clone())
            return
        for rank in range(1, self._ranks):
            take(rank, _alike(self._up[rank].get(timeout=HANG_S), part).to(part.device))


def _alike(sent: Tensor, own: Tensor) -> Tensor:
    assert (sent.device.type, sent.dtype, sent.shape) == (own.device.type, own.dtype, own.shape)
    return sent


def device_of(rank: int) -> torch.device:
    """Return the GPU of a rank."""
    return torch.device("cuda", rank)
