"""Rows and sums that stay in the memory of a device: the CPU's here, over real UCX, as the same code uses it."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dispatch import route
from moesaic.dispatch.routed import asking
from moesaic.dispatch.routed.notes import DIVERGENCES
from moesaic.experts import answering
from moesaic.experts.frames import layer_request
from moesaic.experts.host import ExpertHost
from moesaic.transport import links, served
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame
from moesaic.transport.ucx.network import UcxNetwork
from tests.dispatch.conftest import (
    CPU,
    FP32,
    NUM_LAYERS,
    TIMEOUT_S,
    Cluster,
    open_cluster,
    value_of,
)

EVERYTHING = list(range(8))
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
THIRDS = [[0, 3, 6], [1, 4, 7, 0], [2, 5]]
DOUBLED = [EVERYTHING, EVERYTHING]


class ParcelCluster(Cluster):
    """Expert hosts behind UCX; those named in ``without`` know no parcels.

    Attributes:
        seen: parcels of each request that came to a host, and of its reply.
    """

    listens_on = "127.0.0.1"
    transports: Any = "tcp"
    device = CPU
    without: tuple[str, ...] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[int, int]] = []
        self.answers = [self._noting(host) for host in self.hosts]

    def network(self, worker_id: str) -> Any:
        device = None if worker_id in self.without else self.device
        secret = b"secret"
        return UcxNetwork(worker_id, "expert", secret, self.limits, self.transports, device=device)

    def _noting(self, host: ExpertHost) -> Handler:
        def answer(request: Frame) -> Frame:
            reply = host.answers.answer(request)
            self.seen.append((request.parcels, reply.parcels))
            return reply

        return answer


def cluster_of(kind: str, *without_parcels: str) -> type[ParcelCluster]:
    class Made(ParcelCluster):
        transports = kind
        without = without_parcels

    return Made


def hidden(rows: int, seed: int, dtype: torch.dtype) -> Tensor:
    made = torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


async def sums(c: Any, slots: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """The sums of some batches; two of each layer are under way at once, unless they have replicas.

    Which of these computes depends on loads, so on whose reply comes first.
    """
    c.put_in_force(c.placement(1, *slots))
    await c.all_linked(1)
    step = c.routed.begin_step()
    found: list[Tensor] = []
    for layer in range(NUM_LAYERS):
        batches = [hidden(n, 10 * layer + n, dtype).to(c.where) for n in (1, 37)]
        asked = [c.routed.dispatch(step, layer, rows) for rows in batches[:1]]
        if slots is not HALVES:
            found += await asyncio.gather(*asked)
            asked = []
        asked += [c.routed.dispatch(step, layer, rows) for rows in batches[1:]]
        found += await asyncio.gather(*asked)
    c.routed.end_step(step)
    return found


@pytest.mark.parametrize("kind", ["tcp", "shm"])
@pytest.mark.parametrize("slots", [HALVES, THIRDS, DOUBLED])
@pytest.mark.parametrize(
    ("dtype", "wire"), [(FP32, "own"), (FP32, "int8"), (torch.bfloat16, "own")]
)
async def test_sums_have_the_bits_of_whole_frames(
    cluster: Any,
    tiny_model: Any,
    kind: str,
    slots: list[list[int]],
    dtype: torch.dtype,
    wire: Any,
) -> None:
    options = {"wire": wire, "dtype": dtype}
    async with cluster(tiny_model, len(slots), **options) as c:
        expected = await sums(c, slots, dtype)

    async with open_cluster(tiny_model, len(slots), of=cluster_of(kind), **options) as c:
        found = await sums(c, slots, dtype)

    assert set(c.seen) == {(1, 1)}
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
async def test_few_rows_go_by_rings_and_many_as_parcels_over_the_same_links(
    cluster: Any, tiny_model: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tiny_model, 2, dtype=dtype) as c:
        expected = await sums(c, HALVES, dtype)
    monkeypatch.setattr(route, "BY_HOST_BYTES", 32 * 4)  # of one row

    async with open_cluster(tiny_model, 2, of=cluster_of("auto"), dtype=dtype) as c:
        found = await sums(c, HALVES, dtype)
        links = c.routed.route_of(1).links.values()

    assert all(link.channel is not None and link.memory is not None for link in links)
    assert Counter(c.seen) == {(0, 0): 2 * NUM_LAYERS, (1, 1): 2 * NUM_LAYERS}
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


async def test_one_worker_without_parcels_is_sent_whole_frames_and_so_are_the_others(
    cluster: Any, tiny_model: Any
) -> None:
    async with cluster(tiny_model, 2) as c:
        expected = await sums(c, HALVES, FP32)

    async with open_cluster(tiny_model, 2, of=cluster_of("tcp", "expert-1")) as c:
        found = await sums(c, HALVES, FP32)

    assert set(c.seen) == {(0, 0)}
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


async def test_workers_that_disagree_are_asked_again_with_parcels(tiny_model: Any) -> None:
    async with open_cluster(tiny_model, 2, of=cluster_of("tcp"), crooked=[1]) as c:
        c.put_in_force(c.placement(1, *HALVES))
        before = value_of(DIVERGENCES)

        rows = hidden(5, 0, FP32)
        await c.routed.reachable()
        step = c.routed.begin_step()
        found = await c.routed.dispatch(step, 1, rows)
        c.routed.end_step(step)

        expected = await c.local.dispatch(c.local.begin_step(), 1, rows)
    assert value_of(DIVERGENCES) == before + 1
    assert set(c.seen) == {(1, 1)}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # sums in another order


async def test_each_side_waits_for_its_device_once_a_layer(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: Counter[str] = Counter()

    def count(name: str) -> Callable[[torch.device], None]:
        return lambda device: waits.update([name])

    monkeypatch.setattr(asking, "mark", lambda device: lambda: waits.update(["asking"]))
    monkeypatch.setattr(links, "settle", count("sending a request"))
    monkeypatch.setattr(served, "settle", count("sending an answer"))
    monkeypatch.setattr(answering, "settle", count("answering"))
    async with open_cluster(tiny_model, 3, of=cluster_of("tcp")) as c:
        c.put_in_force(c.placement(1, *THIRDS))
        await c.check()

    assert waits == {"asking": NUM_LAYERS, "answering": 3 * NUM_LAYERS}


async def test_whoever_computes_nothing_sends_no_rows(tiny_model: Any) -> None:
    async with open_cluster(tiny_model, 2, of=cluster_of("tcp")) as c:
        gate = c.gates[0]
        choices = ((seed, gate(hidden(1, seed, FP32))[1]) for seed in range(100))
        seed = next(seed for seed, chosen in choices if int(chosen.max()) < 4)
        c.put_in_force(c.placement(1, *HALVES))
        await c.routed.reachable()
        step = c.routed.begin_step()
        links_by_worker = step.route.links
        calls = [
            (
                links_by_worker[idx],
                layer_request(
                    step.step_id,
                    1,
                    0,
                    seq,
                    [hidden(1, seed, FP32), step.route.basis_of(0)],
                    apart=True,
                ),
            )
            for seq, idx in enumerate((0, 1))
        ]

        replies = await c.client.exchange(calls, TIMEOUT_S)

        c.routed.end_step(step)
    assert [len(reply.tensors[0]) for reply in replies] == [1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
async def test_on_a_gpu_each_side_waits_once_a_layer(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every wait but these is an error."""
    device, waits = torch.device("cuda", 0), Counter[str]()

    def allowed(name: str) -> Callable[[torch.device], None]:
        def settle(device: torch.device) -> None:
            waits.update([name])
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.current_stream(device).synchronize()
            torch.cuda.set_sync_debug_mode("error")

        return settle

    class OnGpu(ParcelCluster):
        transports = "auto"

    OnGpu.device = device
    async with open_cluster(tiny_model, 2, of=OnGpu, where=device) as c:
        await sums(c, DOUBLED, FP32)  # kernels are compiled
        settle = allowed("asking")
        monkeypatch.setattr(asking, "mark", lambda device: lambda: settle(device))
        monkeypatch.setattr(links, "settle", allowed("sending a request"))
        monkeypatch.setattr(answering, "settle", allowed("answering"))
        rows = hidden(16, 0, FP32).to(device)
        step = c.routed.begin_step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = await c.routed.dispatch(step, 1, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        c.routed.end_step(step)
        expected = await c.local.dispatch(c.local.begin_step(), 1, rows)

    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert waits == {"asking": 1, "answering": 2}
