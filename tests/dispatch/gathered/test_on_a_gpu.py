"""Experts are copied to a CUDA device and computed there: the fake one, which finds races of streams."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.parity.cases import ParityCase, build_reference
from moesaic.dispatch.gathered.device import CudaStreams
from moesaic.dispatch.local import LocalDispatcher
from moesaic.errors import InUse
from moesaic.experts.loaded import layout_of
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from tests.dispatch.gathered.locking import locked_memory
from tests.fake_device.clocks import Clocks
from tests.fake_device.cuda import fake_device
from tests.fake_device.tensors import DeviceTensor

GPU = torch.device("cuda", 0)


def streams() -> CudaStreams:
    return CudaStreams(GPU)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    """Interpret kernels on a fake device."""
    with fake_device() as clocks, locked_memory(monkeypatch):
        yield clocks


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers do not all fit into two buffers; kernels are interpreted, so it is small."""
    directory = tmp_path_factory.mktemp("four")
    build_reference(ParityCase("qwen3_moe", "four layers", {"num_hidden_layers": 4}), directory)
    return directory


class Checked:
    """Steps of a worker, of the same rows; every layer has the bits of experts that stay on the device."""

    def __init__(self, workers: Any, worker: int, dtype: torch.dtype) -> None:
        self._workers, self.worker = workers, workers.workers[worker]
        self._rows = torch.randn(3, workers.config.hidden_size).to(GPU, dtype)
        self._expected: dict[int, Tensor] = {}

    async def step(self, upto: int | None = None) -> None:
        dispatcher, reference = self.worker.dispatcher, self._workers.local
        step, found = dispatcher.begin_step(), dict[int, Tensor]()
        for layer in self._workers.layers[:upto]:
            found[layer] = await dispatcher.dispatch(step, layer, self._rows)
        dispatcher.end_step(step)
        # Not before: the host would wait for kernels, and so hide what copies do not wait for.
        for layer, got in found.items():
            if layer not in self._expected:
                own = reference.begin_step()
                self._expected[layer] = await reference.dispatch(own, layer, self._rows)
            assert got.device == GPU
            assert got.dtype == self._rows.dtype
            assert torch.equal(got.cpu(), self._expected[layer].cpu())


@pytest.mark.parametrize(
    ("count", "offload", "dtype"),
    [(1, True, torch.float32), (1, False, torch.bfloat16), (3, False, torch.float32)],
    ids=["file", "host memory", "peers"],
)
async def test_a_gpu_computes_what_it_would_with_all_experts_in_its_memory(
    four_layers: Path, start: Any, gpu: Clocks, count: int, offload: bool, dtype: torch.dtype
) -> None:
    how = {"offload": offload, "dtype": dtype, "streams": streams, "device": GPU}
    async with start(four_layers, count, **how) as workers:
        checked = Checked(workers, count - 1, dtype)
        await checked.step()
        await checked.step(upto=2)
        if count > 1:
            # The checkpoint makes up for it.
            await workers.networks[0].close()
        await checked.step()
        dispatcher = checked.worker.dispatcher
        assert len(dispatcher.compute_s) == len(dispatcher.wait_s) == len(workers.layers)


async def test_a_model_larger_than_the_memory_of_a_gpu_is_computed(
    four_layers: Path, start: Any, gpu: Clocks
) -> None:
    config = load_config(four_layers)
    layout = layout_of(config, torch.float32, as_stored=True)
    gpu.memory_bytes = len(config.moe_layers) * config.moe.num_experts * layout.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        LocalDispatcher(Checkpoint(four_layers), config, torch.float32, GPU)
    local = LocalDispatcher(Checkpoint(four_layers), config, torch.float32, torch.device("cpu"))

    async with start(four_layers, 1, streams=streams, device=GPU) as workers:
        plan, dispatcher = workers.workers[0].plan, workers.workers[0].dispatcher
        own = dispatcher._own
        held = {t.memory for table in (own.resident, *own.tables) for t in memory_of(table)}
        step, rows = dispatcher.begin_step(), torch.randn(3, config.hidden_size)
        for layer in workers.layers:
            got = await dispatcher.dispatch(step, layer, rows.to(GPU))
            expected = await local.dispatch(local.begin_step(), layer, rows)
            # Sums of another kernel, in another order.
            torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
        dispatcher.end_step(step)

    assert sum(memory.nbytes for memory in held) == plan.total_bytes == 3 * plan.layer_bytes


def memory_of(table: Any) -> Iterator[DeviceTensor]:
    for layer in table.layers.values():
        for mlp in layer.mlps:
            yield mlp.gate_up
            yield mlp.down


async def test_a_gpu_with_too_little_memory_is_refused_with_numbers(
    four_layers: Path, start: Any, gpu: Clocks
) -> None:
    gpu.memory_bytes = 20_000  # the gates and not one layer
    with pytest.raises(InUse, match=r"no .* bytes for the experts of 3 layers"):
        async with start(four_layers, 1, streams=streams, device=GPU):
            pass
