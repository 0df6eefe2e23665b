"""The warm-up of an expert worker meets the kernels of later requests, and leaves no trace."""

import gc
import weakref
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.brownout.split import Level
from moesaic.errors import InvalidInput
from moesaic.experts import answering
from moesaic.experts.assignment import Assigner
from moesaic.experts.basis import AssignmentBasis
from moesaic.experts.epochs import Epochs
from moesaic.experts.frames import layer_request
from moesaic.experts.host import ExpertHost
from moesaic.experts.slots import SlotTable
from moesaic.experts.warm_up import WarmUp
from moesaic.experts.without_python import AnswersWithoutPython
from moesaic.kernels.promised import PromisedRows
from moesaic.kernels.warm_up import row_counts
from moesaic.messages.placement import Placement
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.placement.decide.stand_ins import PLAIN, with_substitution
from moesaic.transport.frame import Frame, FrameLimits

CPU, EXPERTS, LAYERS, HIDDEN = torch.device("cpu"), 8, 3, 32


def host_of(
    model: Any, slots: int = EXPERTS, quantization: Any = "none", dtype: torch.dtype = torch.float32
) -> ExpertHost:
    checkpoint, config = Checkpoint(model.directory), load_config(model.directory)
    return ExpertHost(checkpoint, config, "e0", slots, dtype, CPU, quantization)


def placed(
    model: Any, host: ExpertHost, *slots: list[int], substitution: Substitution = PLAIN
) -> Placement:
    """Put the same slots in force in every layer, the first of them on this worker."""
    placement = placement_of(
        [placed_worker(f"e{n}", ridge_rows=8) for n in range(len(slots))],
        slots,
        range(LAYERS),
        EXPERTS,
        epoch=host.epochs.in_force + 1,
        model_digest=load_config(model.directory).digest,
    )
    placement = with_substitution(placement, substitution)
    host.loader.prepare(placement)
    host.epochs.commit(placement.epoch)
    return placement


def request(
    placement: Placement,
    rows: int,
    layer: int = 0,
    loads: bool = False,
    promised: PromisedRows | None = None,
) -> Frame:
    live = tuple(range(len(placement.workers)))
    basis = AssignmentBasis("aebs", live, (3,) * len(live) if loads else None)
    hidden = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
    tensors = [hidden, basis.encode()]
    return layer_request(b"s" * 16, placement.epoch, layer, 1, tensors, promised=promised)


def counters() -> dict[str, float]:
    """Every number that this process shows, but those of Python itself."""
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("moesaic")
    }


@pytest.fixture
def assigners(monkeypatch: pytest.MonkeyPatch) -> "weakref.WeakSet[Assigner]":
    """Those that answers keep."""
    made: weakref.WeakSet[Assigner] = weakref.WeakSet()

    def note(*arguments: Any) -> Assigner:
        assigner = Assigner(*arguments)
        made.add(assigner)
        return assigner

    monkeypatch.setattr(answering, "Assigner", note)
    return made


def trace(host: ExpertHost) -> Any:
    epochs = host.epochs
    return counters(), epochs.tables, epochs.in_force, epochs.slots(), epochs.resident_bytes


@pytest.mark.parametrize("without_python", [False, True])
@pytest.mark.parametrize("slots", [EXPERTS, 3, 11])
@pytest.mark.parametrize("quantization", ["none", "int8"])
async def test_a_warm_up_leaves_no_trace(
    tiny_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    assigners: "weakref.WeakSet[Assigner]",
    quantization: Any,
    slots: int,
    without_python: bool,
) -> None:
    monkeypatch.setattr(Epochs, "ask", pytest.fail)
    monkeypatch.setattr(AnswersWithoutPython, "register", pytest.fail)
    host = host_of(tiny_model, slots, quantization)
    if without_python:
        host.answer_without_python(FrameLimits.of_hidden_size(HIDDEN))
    before = trace(host)

    await host.warm_up.run(9)

    assert trace(host) == before
    host.answers.count()
    assert trace(host) == before
    gc.collect()
    assert not assigners
    report = host.activations.report(worker_id="e0", generation=1, model_digest="d", epoch=0)
    assert report.served == []
    assert report.window.layers == []


async def test_answers_are_the_same_behind_a_warm_up(tiny_model: Any) -> None:
    cold, warm = host_of(tiny_model), host_of(tiny_model)
    await warm.warm_up.run(20)
    for host in (cold, warm):
        placement = placed(tiny_model, host, [0, 1, 2, 3], [4, 5, 6, 7])

    for layer in range(LAYERS):
        frame = request(placement, 7, layer)
        expected, got = cold.answers.answer(frame), warm.answers.answer(frame)
        assert got.body == expected.body
        for one, other in zip(got.tensors, expected.tensors, strict=True):
            assert torch.equal(one, other)


async def test_too_little_memory_is_told_with_the_setting_to_change(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: SlotTable, layer: int, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(hidden) == 300:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 9 GiB\nand more")
        return torch.zeros(hidden.shape)

    monkeypatch.setattr(SlotTable, "compute_slots", full)

    with pytest.raises(InvalidInput) as refused:
        await host_of(tiny_model).warm_up.run(300)

    assert refused.value.field == "--slots-per-layer"
    assert "a batch of 300 rows" in str(refused.value)
    assert "lower it" in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_no_rows_are_no_warm_up(tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotTable, "compute_slots", None)

    await host_of(tiny_model).warm_up.run(0)


@pytest.mark.parametrize(
    ("most", "counts"),
    [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_rows_are_powers_of_two_and_the_most(most: int, counts: list[int]) -> None:
    assert row_counts(most) == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_later_requests_compile_nothing_more(
    tiny_model: Any, launches: set[str], dtype: torch.dtype
) -> None:
    host = host_of(tiny_model, 4, dtype=dtype)
    await host.warm_up.run(48)
    warmed = set(launches)
    halves = [0, 1, 2, 3], [4, 5, 6, 7]

    for workers, rows in [(2, 1), (2, 3), (2, 16), (2, 17), (2, 47), (3, 5), (5, 2), (16, 4)]:
        placement = placed(tiny_model, host, *halves, *[[7, 1, 2, -1]] * (workers - 2))
        frame = request(placement, rows, layer=rows % LAYERS, loads=rows % 2 == 0)
        frame.tensors[0] = frame.tensors[0].to(dtype)
        host.answers.answer(frame)

    names = {key.partition(" ")[0] for key in warmed}
    assert {"_gate_kernel", "_assign_kernel", "_gate_up_kernel", "_combine_kernel"} <= names
    assert launches == warmed


async def test_the_tiles_of_many_rows_are_met_too(tiny_model: Any, launches: set[str]) -> None:
    host = host_of(tiny_model, 2, dtype=torch.bfloat16)
    await host.warm_up.run(160)  # on two slots: tiles of few rows, of more, and of many more
    warmed = set(launches)
    heights = {key for key in warmed if key.startswith("_down_kernel")}
    placement = placed(tiny_model, host, [0, 1], [2, 3, 4, 5, 6, 7][:2], [4, 5], [6, 7])

    for rows in (5, 20, 50, 100):
        frame = request(placement, rows)
        frame.tensors[0] = frame.tensors[0].bfloat16()
        host.answers.answer(frame)

    assert len(heights) == 4
    assert launches == warmed


@pytest.mark.parametrize(
    "substitution",
    [
        Substitution(instead="fewer"),
        Substitution(instead="fewer", rule="instances"),
        Substitution(way=4, instead="united"),
    ],
    ids=lambda each: f"{each.instead}-{each.rule}",
)
async def test_degraded_rows_compile_nothing_once_their_placement_is_prepared(
    tiny_model: Any,
    launches: set[str],
    substitution: Substitution,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moesaic.kernels.triton.grouped_experts.FEW", 4)  # choices: more are sorted
    host = host_of(tiny_model, 7)
    monkeypatch.setattr("moesaic.experts.warm_up.MOST_ROWS", 4)
    host.loader.on_loaded = host.warm_up.degrade
    before = counters()
    placement = placed(tiny_model, host, list(range(7)), [7, 0], substitution=substitution)
    assert counters() == before
    prepared = set(launches)

    for rows in (2, 3):
        promised = PromisedRows([Level(0.6), Level(0.3, 1)], [row % 2 for row in range(rows)])
        host.answers.answer(request(placement, rows, layer=1, promised=promised))

    names = {key.partition(" ")[0] for key in prepared}
    assert {"_count_rows_kernel", "_decide_kernel", "_rewrite_kernel", "_place_kernel"} <= names
    assert launches == prepared


async def test_placements_meet_the_kernels_of_degraded_rows_where_they_have_some(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[Substitution] = []
    monkeypatch.setattr(
        WarmUp,
        "_ask",
        lambda warm_up, answers, tenure, *_: answered.append(tenure.placement.substitution),
    )
    host, fewer = host_of(tiny_model), Substitution(instead="fewer")
    monkeypatch.setattr("moesaic.experts.warm_up.MOST_ROWS", 2)
    host.loader.on_loaded = host.warm_up.degrade

    for substitution in (PLAIN, fewer, fewer):
        placed(tiny_model, host, list(range(8)), substitution=substitution)

    assert answered == [fewer, fewer]  # of one row and of two, once


async def test_placements_are_prepared_even_if_degraded_rows_lack_memory(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SlotTable, "compute_slots", full)
    host = host_of(tiny_model)
    host.loader.on_loaded = host.warm_up.degrade

    with capture_logs() as logs:
        placed(tiny_model, host, list(range(8)), substitution=Substitution(instead="fewer"))

    assert host.epochs.in_force == 1
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["kernels.cold"]


@pytest.mark.usefixtures("gpu")
async def test_a_worker_on_a_gpu_meets_them_when_it_prepares(tiny_model: Any) -> None:
    on_gpu, on_cpu = (
        ExpertHost(
            Checkpoint(tiny_model.directory),
            load_config(tiny_model.directory),
            "e0",
            EXPERTS,
            torch.float32,
            torch.device(name),
        )
        for name in ("cuda:0", "cpu")
    )

    assert on_gpu.loader.on_loaded == on_gpu.warm_up.degrade
    assert on_cpu.loader.on_loaded != on_cpu.warm_up.degrade
