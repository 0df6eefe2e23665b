"""Buffers of a device under every order in which copies and kernels may end.

The ring, the mover and the buffers are those that serve. The device is a queue of copies and one of
kernels, which a random schedule works off piece by piece. The oracle is exact: each kernel compares
all bytes of its buffer with the layer's, when it begins and when it ends.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesaic.dispatch.gathered.device import DeviceBuffers
from moesaic.dispatch.gathered.mover import Mover
from moesaic.dispatch.gathered.plan import GatherPlan, plan_gather
from moesaic.dispatch.gathered.ring import Fill, Ring
from moesaic.errors import PeerLost
from moesaic.experts.pull.ranges import Runs, Share
from moesaic.experts.pull.shard import MemoryShard

NUM_EXPERTS, NBYTES, STUCK = 4, 64, 20_000


class ExploredStreams:
    """Two queues of work, each worked off in order, but neither before the other unless it says so."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[Iterator[bool]]] = {"copies": deque(), "kernels": deque()}

    def advance(self, name: str) -> bool:
        """Do one piece of the oldest work of a queue; false if there is none that may go on."""
        queue = self.queues[name]
        if not queue:
            return False
        went_on = next(queue[0], None)
        if went_on is None:
            queue.popleft()
        return went_on is not False

    def launch(self, work: Iterator[bool]) -> None:
        self.queues["kernels"].append(work)

    def lock(self, memory: Tensor) -> None:
        """It stays where it is."""

    def copy(self, source: Tensor, into: Tensor) -> None:
        def halves() -> Iterator[bool]:
            half = source.shape[1] // 2
            into[:, :half] = source[:, :half]
            yield True
            into[:, half:] = source[:, half:]

        self.queues["copies"].append(halves())

    def record_copies(self) -> "Future[None]":
        return self._record("copies")

    def record_kernels(self) -> "Future[None]":
        return self._record("kernels")

    def copies_wait(self, event: "Future[None]") -> None:
        self.queues["copies"].append(_until(event))

    def kernels_wait(self, event: "Future[None]") -> None:
        self.queues["kernels"].append(_until(event))

    def has_come(self, event: "Future[None]") -> bool:
        return event.done()

    async def come(self, event: "Future[None]") -> None:
        await asyncio.wrap_future(event)

    def seconds(self, first: "Future[None]", last: "Future[None]") -> float:
        return 0.0

    def close(self) -> None:
        while any(self.queues.values()):
            assert any([self.advance("copies"), self.advance("kernels")]), "the streams are stuck"

    def _record(self, name: str) -> "Future[None]":
        event: Future[None] = Future()
        # A waiter that leaves does not end it.
        event.set_running_or_notify_cancel()

        def come() -> Iterator[bool]:
            event.set_result(None)
            yield True

        self.queues[name].append(come())
        return event


def _until(event: "Future[None]") -> Iterator[bool]:
    while not event.done():
        yield False


class AtOnce(Executor):
    """Reads files where it is asked to."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class OtherShares:
    """Peers that give the shares of others, in some turns of the event loop; some pulls fail."""

    def __init__(self, worker: "Worker", share: Share) -> None:
        self._worker, self._share = worker, share
        self.link = SimpleNamespace(peer="peer")

    def divide(self, share: Share, layer: int, runs: Runs, without: Any) -> Any:
        return [(OtherShares(self._worker, share), runs)], []

    async def bring(self, layer: int, runs: Runs, into: Tensor) -> None:
        chance = self._worker.chance
        rows = self._worker.layers[layer][list(self._share.experts(NUM_EXPERTS))].view(-1)
        if layer in self._worker.held_up:
            await self._worker.held_up[layer].wait()
        for start, length in runs:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            if not chance.randrange(8):
                raise PeerLost("peer", "for a moment")
            into[start : start + length] = rows[start : start + length]

    async def close(self) -> None:
        """There is no link."""


class Worker:
    """The parts of a worker that move experts, over explored streams."""

    def __init__(self, plan: GatherPlan, chance: random.Random) -> None:
        generator = torch.Generator().manual_seed(chance.randrange(1 << 30))
        shape = NUM_EXPERTS, NBYTES
        self.layers = {
            layer: torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            for layer in plan.layers
        }
        self.streams, self.plan, self.chance = ExploredStreams(), plan, chance
        order = list(plan.buffered)
        self.expected = {layer: rows[order] for layer, rows in self.layers.items()}
        memory = [
            torch.zeros(len(order), NBYTES, dtype=torch.uint8) for _ in range(plan.num_buffers)
        ]
        self.device = DeviceBuffers(memory, self.streams)
        # The memory is new: nothing uses it.
        while self.streams.advance("kernels"):
            pass
        staged = [
            torch.zeros(len(plan.gathered), NBYTES, dtype=torch.uint8)
            for _ in range(plan.num_buffers)
        ]
        own = list(plan.held.experts)
        shard = MemoryShard({layer: self.layers[layer][own] for layer in plan.gathered_layers})
        self.held_up: dict[int, asyncio.Event] = {}  # pulls by layer, until they are let go on
        peers: Any = OtherShares(self, plan.share)
        files: Any = None  # peers have every share
        self.mover = Mover(plan, staged, files, shard, AtOnce(), peers, self.device)  # type: ignore[arg-type]
        self.ring = Ring(plan.gathered_layers, plan.num_buffers, self.mover.start)
        self.launched = self.computed = 0

    async def until(
        self, met: Callable[[], bool], queues: tuple[str, ...], turns: int = STUCK
    ) -> bool:
        """Let host and device go on by chance until something is so; false if it is not in time."""
        for _ in range(turns):
            if met():
                return True
            await asyncio.sleep(0)
            if queues and self.chance.randrange(2):
                self.streams.advance(self.chance.choice(queues))
        return False

    async def compute(self, layer: int, queues: tuple[str, ...] = ("copies", "kernels")) -> Fill:
        """Launch the kernel of a layer as ``GatheredDispatcher.dispatch`` does."""
        fill = self.ring.enter(layer)
        assert await self.until(fill.done.done, queues), "the host is stuck"
        fill.done.result()
        buffer, expected = self.device.memory[fill.buffer], self.expected[layer]

        def kernel() -> Iterator[bool]:
            for _ in range(self.chance.randrange(1, 4)):
                assert torch.equal(buffer, expected), f"layer {layer} is not there"
                yield True
            assert torch.equal(buffer, expected), f"layer {layer} was written over"
            self.computed += 1

        with self.device.reading(fill):
            self.streams.launch(kernel())
        self.launched += 1
        return fill


def plan_of(num_layers: int, window: int, count: int, *, offload: bool) -> GatherPlan:
    return plan_gather(
        range(num_layers),
        NUM_EXPERTS,
        NBYTES,
        share=Share(0, count),
        offload=offload,
        window=window,
        on_device=True,
    )


@given(
    num_layers=st.integers(2, 7),
    window=st.integers(1, 4),
    count=st.integers(1, 3),
    offload=st.booleans(),
    steps=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 2)), min_size=1, max_size=5),
    seed=st.integers(0, 1 << 30),
)
def test_no_kernel_reads_what_is_not_there_or_is_written_over(
    num_layers: int,
    window: int,
    count: int,
    offload: bool,
    steps: list[tuple[int, int]],
    seed: int,
) -> None:
    async def play() -> None:
        worker = Worker(plan_of(num_layers, window, count, offload=offload), random.Random(seed))
        ring, layers = worker.ring, worker.plan.gathered_layers
        ring.prime()
        for length, slices in steps:
            for layer in layers[:length]:
                # Slices of a sweep compute a layer several times before they leave it.
                for _ in range(slices):
                    fill = await worker.compute(layer)
                ring.leave(fill)
            # As a step that ended early does.
            if length < len(layers):
                ring.enter(layers[0])
        await worker.mover.close()
        worker.streams.close()
        assert worker.computed == worker.launched

    asyncio.run(play())


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("count", "offload"), [(1, True), (2, False)])
def test_the_host_waits_for_no_kernel_before_all_buffers_are_ordered_twice(
    count: int, offload: bool, window: int
) -> None:
    async def play() -> None:
        worker = Worker(plan_of(20, window, count, offload=offload), random.Random(0))
        worker.ring.prime()
        ahead = 2 * worker.plan.num_buffers

        for layer in worker.plan.gathered_layers[:ahead]:
            worker.ring.leave(await worker.compute(layer, queues=("copies",)))

        assert worker.computed == 0
        await worker.mover.close()
        worker.streams.close()
        assert worker.computed == ahead

    asyncio.run(play())


def test_copies_that_wait_for_kernels_are_behind_those_of_the_layer_before() -> None:
    async def play() -> None:
        worker = Worker(plan_of(9, 1, 2, offload=False), random.Random(0))
        first, second, *_ = worker.plan.gathered_layers
        slow = worker.held_up[second] = asyncio.Event()
        worker.ring.prime()
        # No kernel ends. The third layer has the first one's buffer, and its experts are here at once.
        worker.ring.leave(await worker.compute(first, queues=("copies",)))
        assert not await worker.until(lambda: False, ("copies",), turns=100)

        slow.set()
        fill = worker.ring.enter(second)

        def is_there() -> bool:
            return torch.equal(worker.device.memory[fill.buffer], worker.expected[second])

        assert await worker.until(is_there, ("copies",))
        assert worker.computed == 0
        await worker.mover.close()
        worker.streams.close()

    asyncio.run(play())
