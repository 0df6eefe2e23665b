"""A placement that the device has no memory for is refused, and leaves everything as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.errors import PlacementInfeasible
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.pace import LoadPace
from moesaic.messages.placement import Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint

CPU, EXPERTS, LAYERS = torch.device("cpu"), 8, 3
NEW = 5 * LAYERS  # experts that the second placement brings

ERRORS: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 MiB. GPU 0 has …"),
    lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    MemoryError,
]  # fmt: skip


def host_of(model: Any) -> tuple[ExpertHost, Placement, Placement]:
    """A worker with experts 0 to 2 of each layer in force, and a placement with all of them."""
    config = load_config(model.directory)
    host = ExpertHost(
        Checkpoint(model.directory), config, "e0", EXPERTS, torch.float32, CPU, retire_after_s=0.0
    )
    first, second = (
        placement_of(
            [placed_worker("e0")],
            [list(range(count))],
            range(LAYERS),
            EXPERTS,
            epoch=epoch,
            model_digest=config.digest,
        )
        for epoch, count in ((1, 3), (2, EXPERTS))
    )
    host.loader.prepare(first)
    host.epochs.commit(1)
    return host, first, second


def failing_at(host: ExpertHost, number: int, error: Exception) -> Callable[..., LoadedExpert]:
    """A loader whose load with this number finds no memory, and so does each after it."""
    bring, count = host.files.bring(LoadPace()), 0

    def bring_or_fail(layer: int, expert: int) -> LoadedExpert:
        nonlocal count
        count += 1
        if count > number:
            raise error
        return bring(layer, expert)

    return bring_or_fail


@pytest.mark.parametrize("number", range(NEW))
def test_state_stays_whole_whichever_expert_finds_no_memory(tiny_model: Any, number: int) -> None:
    host, first, second = host_of(tiny_model)
    before, size = host.epochs.tables, host.files.expert_bytes
    error, num_threads = ERRORS[number % len(ERRORS)](), 1 + number % 2 * 2

    with pytest.raises(PlacementInfeasible) as refused:
        host.loader.prepare(second, failing_at(host, number, error), num_threads)

    assert refused.value.missing_bytes == refused.value.missing_slots * size > 0
    assert "lower --slots-per-layer" in str(refused.value)
    assert host.loader.fitted_bytes == (3 * LAYERS + number) * size
    assert host.epochs.tables == before
    assert (host.epochs.in_force, host.epochs.answers(2)) == (1, False)
    assert host.epochs.resident_bytes == 3 * LAYERS * size
    # What is there goes on, and with memory the same placement can be had.
    assert host.loader.prepare(first).loaded == 0
    result = host.loader.prepare(second)
    assert (result.loaded, result.kept) == (NEW, 3 * LAYERS)
    host.epochs.commit(2)
    assert host.epochs.slots()[0] == tuple(range(EXPERTS))


def test_other_failures_keep_what_came(tiny_model: Any) -> None:
    host, _, second = host_of(tiny_model)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        host.loader.prepare(second, failing_at(host, 4, RuntimeError("illegal memory access")), 1)

    assert host.loader.fitted_bytes == 0
    assert host.loader.prepare(second).loaded == NEW - 4
