"""Steps in one call with experts elsewhere, whole and in two parts: the logits of a process that has all experts."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.routed.whole_steps import TWO_PARTS_ROWS, RoutedSteps
from moesaic.engine.computing import split_evenly
from moesaic.engine.sequences.sequence import Chunk
from moesaic.engine.thread import EngineThread, engine_thread
from moesaic.experts.basis import AssignmentBasis
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.gate import load_gates
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.native.library import library
from moesaic.transport.contract import Handler
from moesaic.transport.frame import Frame, FrameLimits
from moesaic.transport.ucx.network import UcxNetwork
from tests.dispatch.conftest import CPU, FP32, NUM_EXPERTS, TIMEOUT_S

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")

SLOTS = [[0, 1, 2, 3, 4, 5], [6, 2, 7, 3, 4, 5]]
NUM_BLOCKS, BLOCK_SIZE = 20, 16


class Apart:
    """An attention worker and two expert workers, each on a thread of its own."""

    def __init__(self, directory: Any, stack: AsyncExitStack) -> None:
        self.config, self.checkpoint = load_config(directory), Checkpoint(directory)
        self.decoder = Decoder.load(self.checkpoint, self.config, FP32, CPU)
        self._stack = stack
        # Told to each expert worker with the rows of a layer.
        self.loads: list[list[tuple[int, ...] | None]] = [[] for _ in SLOTS]

    async def open(self) -> None:
        """Link them, with a placement in force."""
        workers, hosts = [], []
        for n in range(len(SLOTS)):
            host = ExpertHost(self.checkpoint, self.config, f"expert-{n}", NUM_EXPERTS, FP32, CPU)
            thread, network = await self._network(f"expert-{n}")
            address = await thread.run(network.listen("127.0.0.1", 0, self._noting(n, host)))
            workers.append(
                PlacedWorker(
                    worker_id=f"expert-{n}",
                    generation=1,
                    admin_address="",
                    data_address=address,
                )
            )
            hosts.append(host)
        layers = list(self.config.moe_layers)
        slots = [[list(each) for each in SLOTS] for _ in layers]
        placement = Placement(
            epoch=1,
            model_digest=self.config.digest,
            num_experts=NUM_EXPERTS,
            workers=workers,
            layers=layers,
            slots=slots,
        )
        for host in hosts:
            host.loader.prepare(placement)
        for host in hosts:
            host.epochs.commit(1)
        self.thread, network = await self._network("attention-0")
        gates = load_gates(self.checkpoint, self.config, FP32, CPU)
        self.routed = await self.thread.build(RoutedDispatcher, network, gates, TIMEOUT_S)
        self.thread.call(self.routed.set_placement, placement)
        await self.thread.run(self.routed.reachable())

    def _noting(self, n: int, host: ExpertHost) -> Handler:
        def answer(request: Frame) -> Frame | Awaitable[Frame]:
            self.loads[n].append(AssignmentBasis.decode(request.tensors[1], len(SLOTS)).load)
            return host.answers.answer(request)

        return answer

    async def _network(self, name: str) -> tuple[EngineThread, UcxNetwork]:
        thread = await self._stack.enter_async_context(engine_thread(CPU, name))
        limits = FrameLimits.of_hidden_size(self.config.hidden_size)
        network = await thread.build(UcxNetwork, name, "expert", b"secret", limits, "ring")
        self._stack.push_async_callback(lambda: thread.run(network.close()))
        return thread, network

    async def logits(self, chunks: list[Chunk], num_parts: int) -> Tensor:
        """The logits of a step in parts, as many as it is to have; no layer of it may be left to Python."""
        whole = self.decoder.whole_steps(self.decoder.new_kv_cache(NUM_BLOCKS, BLOCK_SIZE))
        assert whole is not None
        steps = RoutedSteps(self.routed, whole, self.config.hidden_size)
        assert steps.num_parts(sum(len(chunk.token_ids) for chunk in chunks)) == num_parts
        batches = [batch_of(part) for part in split_evenly(chunks, num_parts)]

        async def compute() -> Tensor:
            step = self.routed.begin_step()
            logits = await steps.forward(step, batches)
            self.routed.end_step(step)
            assert logits is not None
            return logits

        return await self.thread.run(compute())

    async def reference(self, chunks: list[Chunk]) -> Tensor:
        """The same, by a process with all experts."""
        local = LocalDispatcher(self.checkpoint, self.config, FP32, CPU)
        step = local.begin_step()
        cache = self.decoder.new_kv_cache(NUM_BLOCKS, BLOCK_SIZE)
        return await self.decoder.forward(
            batch_of(chunks), cache, lambda layer, rows: local.dispatch(step, layer, rows)
        )


def batch_of(chunks: list[Chunk]) -> StepBatch:
    return StepBatch(
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        positions=[chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))],
        sequence_rows=[len(chunk.token_ids) for chunk in chunks],
        block_tables=[chunk.block_table for chunk in chunks],
        wanted=[chunk.wanted for chunk in chunks],
    )


def chunks_of(num_rows: int) -> list[Chunk]:
    """Three sequences; where there are two parts, the second is cut."""
    owner: Any = None
    generator = torch.Generator().manual_seed(3)

    def chunk(num: int, block: int, wanted: int) -> Chunk:
        tokens = torch.randint(1, 160, (num,), generator=generator).tolist()
        return Chunk(owner, tokens, 0, list(range(block, NUM_BLOCKS)), wanted=wanted)

    return [chunk(3, 0, 1), chunk(num_rows - 4, 1, 21), chunk(1, NUM_BLOCKS - 1, 1)]


@pytest.fixture
async def apart(tiny_model: Any) -> AsyncIterator[Apart]:
    async with AsyncExitStack() as stack:
        opened = Apart(tiny_model.directory, stack)
        await opened.open()
        yield opened


@pytest.mark.parametrize(("num_rows", "num_parts"), [(TWO_PARTS_ROWS - 1, 1), (TWO_PARTS_ROWS, 2)])
async def test_logits_are_those_of_one_process(apart: Apart, num_rows: int, num_parts: int) -> None:
    chunks = chunks_of(num_rows)
    with torch.inference_mode():
        logits = await apart.logits(chunks, num_parts)
        expected = await apart.reference(chunks)

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


async def test_parts_under_way_together_are_shared_out_with_regard_to_each_other(
    apart: Apart,
) -> None:
    with torch.inference_mode():
        await apart.logits(chunks_of(TWO_PARTS_ROWS - 1), 1)
        await apart.logits(chunks_of(TWO_PARTS_ROWS), 2)
        await apart.logits(chunks_of(TWO_PARTS_ROWS), 2)

    num_layers = len(apart.config.moe_layers)
    for told in apart.loads:
        whole, first, second = (
            told[:num_layers],
            told[num_layers : 3 * num_layers],
            told[3 * num_layers :],
        )
        assert whole == [None] * num_layers  # nothing else is under way
        # The first rows of a step find nobody at work. The load of others is unknown before the first replies.
        assert first[:2] == [None, (0, 0)]
        assert second[0] is None
        assert all(load is not None and sum(load) > 0 for load in second[1:])
