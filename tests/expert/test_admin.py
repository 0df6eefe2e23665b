"""Loading, one placement after the other, whatever becomes of the callers."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.cluster.placements import encode_placement
from moesaic.errors import CheckpointError
from moesaic.experts.host import ExpertHost
from moesaic.experts.slots import LoadResult
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.expert.admin import ExpertAdmin
from moesaic.v1 import expert_pb2 as pb


class SlowHost(ExpertHost):
    """Loads when it is told to, and tells that it has begun."""

    def __init__(self, model: Any) -> None:
        checkpoint, config = Checkpoint(model.directory), load_config(model.directory)
        super().__init__(checkpoint, config, "e", 8, torch.float32, torch.device("cpu"))
        self.begun, self.may_load, self.loaded = (threading.Event() for _ in range(3))
        prepare = self.loader.prepare

        def slowly(*arguments: Any) -> LoadResult:
            self.begun.set()
            self.may_load.wait()
            try:
                return prepare(*arguments)
            finally:
                self.loaded.set()

        self.loader.prepare = slowly  # type: ignore[method-assign]


async def test_what_is_aborted_while_it_loads_is_freed_in_time_even_if_nobody_waits(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_model.directory)
    host = SlowHost(tiny_model)
    service = ExpertAdmin()
    service.host = host
    placement = placement_of(
        [placed_worker("e")], [list(range(8))], config.moe_layers, 8, model_digest=config.digest
    )
    request = pb.PreparePlacementRequest(placement=encode_placement(placement))

    preparing = asyncio.create_task(service.PreparePlacement(request, Any))  # type: ignore[arg-type]
    await asyncio.to_thread(host.begun.wait)
    preparing.cancel()
    await asyncio.gather(preparing, return_exceptions=True)
    aborting = asyncio.create_task(
        service.AbortPlacement(pb.AbortPlacementRequest(epoch=1), Any)  # type: ignore[arg-type]
    )
    await asyncio.sleep(0)  # it has asked
    host.may_load.set()
    await aborting
    await asyncio.to_thread(host.loaded.wait)

    assert not host.epochs.answers(1)
    let_go_of_kept(host, monkeypatch)
    assert host.epochs.resident_bytes == 0


class Context:
    """Takes note of an error that a call ends with."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    async def abort(self, *_: Any, **__: Any) -> None:
        self.aborted.set()


async def test_all_that_is_loaded_for_an_epoch_ends_with_it(tiny_model: Any) -> None:
    service, request = slow_service(tiny_model)
    contexts = [Context(), Context()]  # whoever asked has died; its successor asks as well

    preparing = [
        asyncio.create_task(service.PreparePlacement(request, context))  # type: ignore[arg-type]
        for context in contexts
    ]
    await asyncio.sleep(0)  # they have asked
    await service.AbortPlacement(pb.AbortPlacementRequest(epoch=1), Context())  # type: ignore[arg-type]

    await asyncio.gather(*preparing, return_exceptions=True)
    assert all(context.aborted.is_set() for context in contexts)
    assert service.host is not None
    assert service.host.epochs.resident_bytes == 0


async def test_a_worker_that_stops_does_not_go_on_loading(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, request = slow_service(tiny_model)
    host, context = service.host, Context()
    assert isinstance(host, SlowHost)

    preparing = asyncio.create_task(service.PreparePlacement(request, context))  # type: ignore[arg-type]
    await asyncio.to_thread(host.begun.wait)
    await service.close()  # or it would rest for long

    await asyncio.gather(preparing, return_exceptions=True)
    assert context.aborted.is_set()
    let_go_of_kept(host, monkeypatch)
    assert host.epochs.resident_bytes == 0


def let_go_of_kept(host: ExpertHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a host forget the experts of preparations that came to nothing."""
    monkeypatch.setattr("moesaic.experts.preparing.kept.KEEP_S", -1.0)
    host.retire()


def slow_service(model: Any) -> tuple[ExpertAdmin, pb.PreparePlacementRequest]:
    """A worker, and what it would need long to load."""
    config = load_config(model.directory)
    service = ExpertAdmin()
    service.host = host = SlowHost(model)
    host.may_load.set()
    placement = placement_of(
        [placed_worker("e")], [list(range(8))], config.moe_layers, 8, model_digest=config.digest
    )
    return service, pb.PreparePlacementRequest(
        placement=encode_placement(placement), load_share=1e-6
    )


async def test_what_is_loaded_for_a_scheduler_that_died_ends_when_its_successor_confirms(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(tiny_model.directory)
    service = ExpertAdmin()
    host = service.host = SlowHost(tiny_model)
    host.may_load.set()

    def wanted(epoch: int, experts: list[int]) -> pb.PreparePlacementRequest:
        placement = placement_of(
            [placed_worker("e")],
            [experts],
            config.moe_layers,
            8,
            epoch=epoch,
            model_digest=config.digest,
        )
        return pb.PreparePlacementRequest(
            placement=encode_placement(placement), load_share=1.0 if epoch == 1 else 1e-6
        )

    class Context:
        async def abort(self, *_: Any, **__: Any) -> None:
            """As gRPC does, but that nothing is raised."""

    async def confirm() -> None:
        await service.PreparePlacement(wanted(1, [0, 1]), Context())  # type: ignore[arg-type]
        await service.CommitPlacement(pb.CommitPlacementRequest(epoch=1), Context())  # type: ignore[arg-type]

    await confirm()
    bytes_in_force = host.epochs.resident_bytes
    host.begun.clear()
    abandoned = asyncio.create_task(service.PreparePlacement(wanted(2, [2, 3]), Context()))  # type: ignore[arg-type]
    await asyncio.to_thread(host.begun.wait)

    await confirm()  # or it would wait for long

    await abandoned
    let_go_of_kept(host, monkeypatch)
    assert (host.epochs.in_force, host.epochs.resident_bytes) == (1, bytes_in_force)


async def test_a_placement_that_another_follows_before_its_commit_is_told_is_answered(
    tiny_model: Any,
) -> None:
    service, request = slow_service(tiny_model)
    host = service.host
    assert host is not None
    first = request.placement

    def numbered(epoch: int) -> pb.PreparePlacementRequest:
        wanted = pb.PreparePlacementRequest()
        wanted.placement.CopyFrom(first)
        wanted.placement.epoch = epoch
        if epoch > 1:
            wanted.serving.CopyFrom(first)
            wanted.serving.epoch = epoch - 1
        return wanted

    for epoch in (1, 2, 3):  # the scheduler has committed each; steps may ask for 2 any moment
        await service.PreparePlacement(numbered(epoch), Context())  # type: ignore[arg-type]

    assert host.epochs.in_force == 2
    assert host.epochs.placement(2) is not None
    await service.CommitPlacement(pb.CommitPlacementRequest(epoch=3), Context())  # type: ignore[arg-type]
    assert host.epochs.placement(2) is not None


async def test_a_serving_placement_that_was_not_prepared_here_changes_nothing(
    tiny_model: Any,
) -> None:
    service, request = slow_service(tiny_model)
    host = service.host
    assert host is not None
    request.load_share = 1.0
    request.serving.CopyFrom(request.placement)
    request.serving.layers[0].workers[0].expert_ids[0] = 7  # another one of this epoch
    await service.PreparePlacement(request, Context())  # type: ignore[arg-type]
    await service.PreparePlacement(request, Context())  # type: ignore[arg-type]
    assert host.epochs.placement(1) is not None
    assert host.epochs.in_force == 0


@pytest.fixture
def damaged(tiny_model: Any, tmp_path: Path) -> Path:
    """The model with one infinite weight in an expert."""
    directory = tmp_path / "damaged"
    shutil.copytree(tiny_model.directory, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts.3.down_proj" in name)
    tensors[name].view(-1)[5] = float("inf")
    save_file(tensors, path)
    return directory


@pytest.mark.parametrize(("serves", "ends"), [(False, True), (True, False)])
async def test_damage_ends_a_worker_unless_its_cluster_serves_already(
    damaged: Path, serves: bool, ends: bool
) -> None:
    config = load_config(damaged)
    service = ExpertAdmin()
    service.host = ExpertHost(
        Checkpoint(damaged), config, "e", 8, torch.float32, torch.device("cpu")
    )

    def placement(experts: list[int]) -> Any:
        return encode_placement(
            placement_of(
                [placed_worker("e")],
                [experts],
                config.moe_layers,
                8,
                epoch=2 if len(experts) == 8 else 1,
                model_digest=config.digest,
            )
        )

    request = pb.PreparePlacementRequest(placement=placement(list(range(8))), load_share=1.0)
    if serves:
        request.serving.CopyFrom(placement([0, 1]))
    context = Context()
    ending = asyncio.create_task(service.until_damaged())
    preparing = service.PreparePlacement(request, context)  # type: ignore[arg-type]
    await asyncio.gather(preparing, return_exceptions=True)

    assert context.aborted.is_set()  # the scheduler is told in any case
    if ends:
        with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj"):
            await ending
    else:
        await asyncio.sleep(0)
        assert not ending.done()
        ending.cancel()


async def test_memory_that_runs_out_is_told_with_its_bytes_and_the_old_placement_stays(
    tiny_model: Any,
) -> None:
    service, request = slow_service(tiny_model)
    host = service.host
    assert host is not None
    pack, size = host.files.pack, host.files.expert_bytes
    first, second = pb.PreparePlacementRequest(), pb.PreparePlacementRequest()
    for epoch, wanted in ((1, first), (2, second)):
        wanted.placement.CopyFrom(request.placement)
        wanted.placement.epoch = epoch
    for layer in first.placement.layers:
        del layer.workers[0].expert_ids[2:]
    context = ToldContext()
    await service.PreparePlacement(first, context)  # type: ignore[arg-type]
    await service.CommitPlacement(pb.CommitPlacementRequest(epoch=1), context)  # type: ignore[arg-type]

    def full(layer: int, *rest: Any) -> None:
        if layer == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 MiB.")
        pack(layer, *rest)

    host.files.pack = full  # type: ignore[method-assign]
    await service.PreparePlacement(second, context)  # type: ignore[arg-type]

    assert context.told == [grpc.StatusCode.FAILED_PRECONDITION]
    assert f"6 expert slots ({6 * size} bytes) are missing; cpu had memory for" in context.texts[0]
    assert "lower --slots-per-layer" in context.texts[0]
    assert (host.epochs.in_force, host.epochs.answers(2)) == (1, False)
    assert host.epochs.resident_bytes == 2 * 3 * size


class ToldContext(Context):
    """Takes note of the statuses that calls end with."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[grpc.StatusCode] = []
        self.texts: list[str] = []

    async def abort(self, code: grpc.StatusCode, text: str, *_: Any) -> None:
        self.told.append(code)
        self.texts.append(text)
