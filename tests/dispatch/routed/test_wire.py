"""Rows and sums travel in their own dtype or as bytes: right to the bit of a sum by hand, natively and in Python."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.routed.notes import DIVERGENCES
from moesaic.dispatch.sum_order import combine
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.errors import ExpertUnavailable, InvalidInput
from moesaic.experts.basis import AssignmentBasis
from moesaic.experts.frames import FLOAT32_SUMS
from moesaic.experts.wire_rows import from_wire, pack_rows, to_wire
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.wire import WireDtype
from moesaic.native.library import library
from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.ucx.network import UcxNetwork
from tests.dispatch.conftest import TIMEOUT_S, value_of

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
EVERYTHING = list(range(8))
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
THIRDS = [[0, 3, 6], [1, 4, 7, 0], [2, 5]]
NUM_LAYERS = 3
T = TypeVar("T")


def hidden(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def request_of(rows: Tensor, workers: int, layer: int = 1, flags: int = 0) -> Frame:
    basis = AssignmentBasis("static", tuple(range(workers))).encode()
    return Frame(kind=FrameKind.REQUEST, epoch=1, layer=layer, flags=flags, tensors=[rows, basis])


async def dispatched(
    c: Any, rows: Tensor, layer: int = 1, promised: PromisedRows | None = None
) -> Tensor:
    await c.routed.reachable()
    step = c.routed.begin_step()
    try:
        summed: Tensor = await c.routed.dispatch(step, layer, rows, promised)
        return summed
    finally:
        c.routed.end_step(step)


@pytest.mark.parametrize("slots", [[EVERYTHING], HALVES, THIRDS])
async def test_packed_rows_bring_the_packed_sums_of_what_they_stand_for(
    cluster: Any, tiny_model: Any, slots: list[list[int]]
) -> None:
    async with cluster(tiny_model, len(slots), scheduling="static", wire="int8") as c:
        placement = c.placement(1, *slots)
        c.put_in_force(placement)
        rows = hidden(9)
        seen = request_of(from_wire(pack_rows(rows)), len(slots))
        parts = [host.answers.answer(seen).tensors[0] for host in c.hosts]

        got = await dispatched(c, rows)

        by_worker = {n: from_wire(to_wire(part, "int8")) for n, part in enumerate(parts)}
        assert torch.equal(got, combine(placement.workers, by_worker, len(rows)))
        exact = await c.local.dispatch(c.local.begin_step(), 1, rows)
        assert 0 < (got - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("wire", ["own", "int8"])
async def test_sums_of_bfloat16_rows_travel_in_the_form_of_the_rows(
    cluster: Any, tiny_model: Any, wire: WireDtype
) -> None:
    async with cluster(tiny_model, 2, wire=wire, dtype=BF16) as c:
        c.put_in_force(c.placement(1, *HALVES))
        rows = hidden(9).to(BF16)
        sent = to_wire(rows, wire)

        replies = [host.answers.answer(request_of(sent, 2)) for host in c.hosts]
        wide = [host.answers.answer(request_of(sent, 2, flags=FLOAT32_SUMS)) for host in c.hosts]
        got = await dispatched(c, rows)

        assert {reply.tensors[0].dtype for reply in replies} == {sent.dtype}
        assert {reply.tensors[0].dtype for reply in wide} == {FP32}
        assert got.dtype == BF16
        exact = (await c.local.dispatch(c.local.begin_step(), 1, rows)).float()
        assert (got.float() - exact).norm() / exact.norm() < (0.01 if wire == "own" else 0.05)


async def test_float32_rows_bring_float32_sums(cluster: Any, tiny_model: Any) -> None:
    async with cluster(tiny_model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))

        replies = [host.answers.answer(request_of(hidden(3), 2)) for host in c.hosts]

        assert {reply.tensors[0].dtype for reply in replies} == {FP32}


async def test_where_workers_disagree_the_gate_here_sees_the_rows_that_they_saw(
    cluster: Any, tiny_model: Any
) -> None:
    rows, summed = hidden(40), []
    before = value_of(DIVERGENCES)
    for crooked in ([], [1]):
        options = {"scheduling": "static", "wire": "int8", "crooked": crooked}
        async with cluster(tiny_model, 2, **options) as c:
            c.put_in_force(c.placement(1, *HALVES))
            summed.append(await dispatched(c, rows))

    right, overruled = summed
    assert value_of(DIVERGENCES) == before + 1
    # The bits tell: packed rows choose other experts for some row, or the same with other weights.
    weights, _ = c.gates[1](from_wire(pack_rows(rows)))
    assert not torch.equal(weights, c.gates[1](rows)[0])
    assert torch.equal(overruled, right)


@pytest.mark.parametrize("rows", [torch.zeros(2, 32).int(), torch.zeros(2, 32, dtype=torch.int8)])
async def test_rows_of_another_form_are_refused(
    cluster: Any, tiny_model: Any, rows: Tensor
) -> None:
    async with cluster(tiny_model, 1) as c:
        c.put_in_force(c.placement(1, EVERYTHING))

        with pytest.raises(InvalidInput, match=r"frame\.tensors"):
            c.hosts[0].answers.answer(request_of(rows, 1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.int8])
async def test_sums_of_another_form_are_not_believed(
    cluster: Any, tiny_model: Any, dtype: torch.dtype
) -> None:
    async with cluster(tiny_model, 1) as c:
        c.put_in_force(c.placement(1, EVERYTHING))
        await c.routed.reachable()

        async def wrong(request: Frame) -> Frame:
            reply = c.hosts[0].answers.answer(request)
            reply.tensors[0] = reply.tensors[0].to(dtype)
            return reply

        c.answers[0] = wrong

        with pytest.raises(ExpertUnavailable, match="another shape"):
            await dispatched(c, hidden(3))


class OverRings:
    """Expert hosts and a dispatcher on threads of their own, with shared memory between them."""

    def __init__(
        self, cluster: Any, client: EngineThread, answering: Sequence[tuple[EngineThread, Any]]
    ) -> None:
        self.cluster, self._client, self._answering = cluster, client, answering

    async def dispatched(
        self, rows: Tensor, layer: int, promised: PromisedRows | None = None
    ) -> Tensor:
        return await self._client.run(dispatched(self.cluster, rows, layer, promised))

    async def answered_natively(self, ask: Callable[[], Awaitable[T]], num_answers: int) -> T:
        """Ask until hosts give all answers without Python, which may take a request while it is awake."""
        while True:
            await self._take_count()
            got = await ask()
            if await self._take_count() == num_answers:
                return got

    async def _take_count(self) -> int:
        # A thread counts a batch when its reply has left.
        for thread, _ in self._answering:
            await thread.run(asyncio.sleep(0))
        return sum(int(answers.take_tally().batches) for _, answers in self._answering)


@asynccontextmanager
async def over_rings(cluster: Any, slots: list[list[int]], wire: WireDtype) -> AsyncIterator[Any]:
    """Serve the hosts of a cluster that listens nowhere."""
    c, answering = cluster, []
    async with AsyncExitStack() as stack:

        async def opened(name: str, role: str) -> tuple[EngineThread, UcxNetwork]:
            thread = await stack.enter_async_context(engine_thread(CPU, name))
            network = await thread.build(UcxNetwork, name, role, b"secret", c.limits, "ring")
            stack.push_async_callback(lambda: thread.run(network.close()))
            return thread, network

        for n, host in enumerate(c.hosts):
            thread, network = await opened(f"expert-{n}", "expert")
            answers = host.answer_without_python(c.limits)
            answering.append((thread, answers))
            await thread.build(network.answer_by, answers.c)
            c.addresses[n] = await thread.run(network.listen("127.0.0.1", 0, host.answers.answer))
        client, network = await opened("attention-0", "attention")
        c.routed = await client.build(
            RoutedDispatcher, network, c.gates, TIMEOUT_S, "aebs", wire=wire
        )
        stack.push_async_callback(lambda: client.run(c.routed.close()))
        placement = c.placement(1, *slots)
        for host in c.hosts:
            host.loader.prepare(placement)
        for host in c.hosts:
            host.epochs.commit(1)
        await client.build(c.routed.set_placement, placement)
        yield OverRings(c, client, answering)


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("wire", ["own", "int8"])
async def test_bfloat16_rows_are_sent_by_c_with_the_bits_of_python(
    cluster: Any, unlinked_cluster: Any, tiny_model: Any, wire: WireDtype
) -> None:
    batches = [(hidden(rows, rows).to(BF16), layer) for rows in (1, 64) for layer in (0, 1)]
    async with cluster(tiny_model, 3, wire=wire, dtype=BF16) as c:
        c.put_in_force(c.placement(1, *THIRDS))
        python = [await dispatched(c, rows, layer) for rows, layer in batches]

    made = unlinked_cluster(tiny_model, 3, dtype=BF16)
    async with over_rings(made, THIRDS, wire) as rings:
        begun: list[object] = []
        native_begin = rings.cluster.routed.native.begin

        def begin(*arguments: Any) -> object:
            begun.append(native_begin(*arguments))
            return begun[-1]

        rings.cluster.routed.native.begin = begin
        native = [await rings.dispatched(rows, layer) for rows, layer in batches]

    assert None not in begun
    assert len(begun) == len(batches)
    for got, expected in zip(native, python, strict=True):
        assert got.dtype == BF16
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("wire", ["own", "int8"])
@pytest.mark.parametrize("slots", [[EVERYTHING], HALVES, THIRDS])
async def test_native_exchanges_have_the_bits_of_python(
    cluster: Any, unlinked_cluster: Any, tiny_model: Any, slots: list[list[int]], wire: WireDtype
) -> None:
    batches = [(hidden(rows, rows), layer) for rows in (1, 7, 64) for layer in range(NUM_LAYERS)]
    batches[0][0][0, 3] = torch.nan
    async with cluster(tiny_model, len(slots), wire=wire) as c:
        c.put_in_force(c.placement(1, *slots))
        python = [await dispatched(c, rows, layer) for rows, layer in batches]

    async with over_rings(unlinked_cluster(tiny_model, len(slots)), slots, wire) as rings:

        async def ask() -> list[Tensor]:
            return [await rings.dispatched(rows, layer) for rows, layer in batches]

        native = await rings.answered_natively(ask, len(batches) * len(slots))
        for got, expected in zip(native, python, strict=True):
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
