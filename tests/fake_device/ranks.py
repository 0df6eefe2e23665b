"""``torch.distributed`` between threads: NCCL is not here, and gloo takes no tensors of the fake device."""

import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.parity.cases import Served
from moesaic.dispatch.local import LocalDispatcher
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.division import divide
from moesaic.models.layers.decoder import Decoder
from moesaic.models.tensor_parallel import group as group_module
from moesaic.models.tensor_parallel.follower import Follower
from moesaic.models.tensor_parallel.group import RankGroup
from moesaic.models.tensor_parallel.leader import lead
from moesaic.models.weights.checkpoint import Checkpoint
from tests.fake_device.cuda import fake_device
from tests.fake_device.tensors import Device, DeviceTensor
from tests.kernels.played_graphs import capturing
from tests.waiting import HANG_S

# What NCCL wants alike in all ranks: that an operation is captured, or the graph that it is launched by.
_Way = tuple[str, int]
_EAGER: _Way = ("eager", 0)


class Threads:
    """As much of ``torch.distributed`` as ``RankGroup`` uses; each thread is one rank.

    All ranks of a collective must use one kind of device, as with NCCL and gloo, and must capture it or
    replay it together, as NCCL alone wants it.

    Attributes:
        found: errors of ranks that have ended with one.
    """

    def __init__(self, ranks: int) -> None:
        """Connect the first rank with each of the others."""
        self._own = threading.local()
        self._down: list[queue.Queue[Any]] = [queue.Queue() for _ in range(ranks)]
        self._up: list[queue.Queue[Any]] = [queue.Queue() for _ in range(ranks)]
        self._ranks = ranks
        self.found: list[Exception] = []

    def init_process_group(self, backend: str, *, rank: int, **_: Any) -> None:
        """Note this thread's rank."""
        assert "nccl" in backend
        self._own.rank, self._own.captured = rank, 0
        self._own.graphs = WeakSet()

    def destroy_process_group(self) -> None:
        """Fail where NCCL waits forever: a graph has operations of the group."""
        assert not any(graph.steps for graph in self._own.graphs), "a graph outlives its group"

    def lost(self, error: Exception) -> None:
        """Close the connections of a rank that ends with an error: nobody waits for it."""
        self.found.append(error)
        traceback.print_exception(error)
        for connection in (*self._down, *self._up):
            connection.put(None)

    def broadcast(self, tensor: Tensor, _: int) -> None:
        """See ``torch.distributed``."""
        self._together(self._broadcast, tensor)

    def reduce(self, part: Tensor, _: int) -> None:
        """See ``torch.distributed``."""
        self._together(self._reduce, part)

    def gather(self, part: Tensor, parts: list[Tensor] | None, _: int) -> None:
        """See ``torch.distributed``."""
        self._together(self._gather, part, parts)

    def _together(self, collective: Callable[..., None], *tensors: Any) -> None:
        graph = capturing() if tensors[0].is_cuda else None
        if graph is None:
            collective(_EAGER, *tensors)
            return
        self._own.captured += 1
        self._own.graphs.add(graph)
        with _disable_current_modes():
            collective(("captured", self._own.captured), *tensors)
        graph.note(partial(collective, ("replayed", self._own.captured)), *tensors)

    def _broadcast(self, way: _Way, tensor: Tensor) -> None:
        if self._own.rank:
            tensor.copy_(_received(self._down[self._own.rank], way, tensor))
            return
        for rank in range(1, self._ranks):
            self._down[rank].put((way, _Sent(tensor)))

    def _reduce(self, way: _Way, part: Tensor) -> None:
        self._bring(way, part, lambda _, other: part.add_(other))

    def _gather(self, way: _Way, part: Tensor, parts: list[Tensor] | None) -> None:
        if parts is not None:
            parts[0].copy_(part)
        self._bring(way, part, lambda rank, other: (parts or [])[rank].copy_(other))

    def _bring(self, way: _Way, part: Tensor, take: Callable[[int, Tensor], object]) -> None:
        if self._own.rank:
            self._up[self._own.rank].put((way, _Sent(part)))
            return
        for rank in range(1, self._ranks):
            take(rank, _received(self._up[rank], way, part))


def _received(connection: "queue.Queue[Any]", way: _Way, own: Tensor) -> Tensor:
    if (got := connection.get(timeout=HANG_S)) is None:
        raise RuntimeError("connection closed by peer")
    other, sent = got
    assert other == way, f"one rank has it {other}, another {way}: with NCCL, both wait forever"
    received: Tensor = sent.on_device_of(own)
    return received


class _Sent:
    """The numbers of a tensor on their way; the stream that receives them waits for the one that sends."""

    def __init__(self, tensor: Tensor) -> None:
        self.moment: Any = None
        self.numbers = tensor.inner.clone() if isinstance(tensor, DeviceTensor) else tensor.clone()
        if isinstance(tensor, DeviceTensor):
            stream = Device.streams.current(tensor.device).number
            Device.clocks.work(stream, [tensor.memory], [])
            self.moment = Device.clocks.moment(stream)

    def on_device_of(self, own: Tensor) -> Tensor:
        """Return a tensor like ``own`` with the numbers."""
        numbers = self.numbers
        assert (self.moment is not None, numbers.dtype) == (own.is_cuda, own.dtype)
        assert numbers.shape == own.shape
        if not isinstance(own, DeviceTensor):
            return numbers
        stream = Device.streams.current(own.device).number
        Device.clocks.stream_waits(stream, self.moment)
        received: Any = torch.zeros_like(own)
        received.inner.copy_(numbers)
        return cast("Tensor", received)


def device_of(rank: int) -> torch.device:
    """Return the GPU of a rank."""
    return torch.device("cuda", rank)


def _lost(error: Exception) -> NoReturn:
    raise error


@contextmanager
def served_by_ranks(
    directory: Path, ranks: int, threads: Threads, play: Any = ExitStack
) -> Iterator[tuple[Served, LocalDispatcher]]:
    """Serve a model on so many fake GPUs, led from here.

    Args:
        directory: the model.
        ranks: their number.
        threads: what connects them.
        play: context of all of them on the fake device, such as ``played_graphs``.

    Yields:
        The model, and its routed experts.
    """
    served, config = Served(directory), load_config(directory)

    def part(rank: int) -> tuple[Decoder, RankGroup]:
        how = Checkpoint(directory), config, torch.float32, device_of(rank)
        store: Any = None
        group = RankGroup(rank, ranks, store, device_of(rank), _lost)
        return Decoder.load(*how, division=divide(config, rank, ranks)), group

    def follow(rank: int) -> None:
        try:
            decoder, group = part(rank)
            Follower(decoder, group).run()
            group.close()
        except Exception as error:
            threads.lost(error)

    with (
        pytest.MonkeyPatch.context() as patch,
        fake_device(devices=ranks),
        play(),
        torch.inference_mode(),
    ):
        patch.setattr(group_module, "dist", threads)
        following = [
            threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, ranks)
        ]
        for each in following:
            each.start()
        torch.cuda.set_device(device_of(0))  # as the engine's thread does
        own, group = part(0)
        served.decoder = lead(own, group)
        served.cache = served.decoder.new_kv_cache(served.cache.num_blocks, served.cache.block_size)
        experts = LocalDispatcher(Checkpoint(directory), config, torch.float32, device_of(0))

        async def moe(layer: int, hidden_states: Tensor) -> Tensor:
            return await experts.dispatch(experts.begin_step(), layer, hidden_states)

        served.moe = moe
        try:
            yield served, experts
        finally:
            group.close()
            for each in following:
                each.join()
