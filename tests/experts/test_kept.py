"""Preparations that are given up and repeated, on the real weights of a small model."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import placements
from benchmarks.common.placements import placed_worker
from moesaic.errors import CheckpointError, NotReady
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.pace import LoadPace
from moesaic.experts.preparing.kept import KEEP_S, KeptExperts
from moesaic.messages.placement import Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint

CPU = torch.device("cpu")
DEMO = Path(__file__).parents[2] / "models/demo"


@pytest.fixture
def host() -> ExpertHost:
    config = load_config(DEMO)
    checkpoint = Checkpoint.of_model(DEMO, config)
    return ExpertHost(checkpoint, config, "w", config.moe.num_experts, torch.float32, CPU)


def placement_of(host: ExpertHost, epoch: int, experts: list[int]) -> Placement:
    config = load_config(DEMO)
    worker = placed_worker("w")
    return placements.placement_of(
        [worker],
        [experts],
        config.moe_layers,
        config.moe.num_experts,
        epoch=epoch,
        model_digest=config.digest,
    )


class Failing:
    """Loads experts until it has loaded some, then fails; notes each that it loaded."""

    def __init__(self, host: ExpertHost, after: int, error: Exception) -> None:
        self._bring, self._error = host.files.bring(LoadPace()), error
        self._after, self.loaded = after, list[tuple[int, int]]()
        self._lock = threading.Lock()

    def __call__(self, layer: int, expert: int) -> LoadedExpert:
        with self._lock:
            if len(self.loaded) == self._after:
                raise self._error
            self.loaded.append((layer, expert))
        return self._bring(layer, expert)


@pytest.mark.parametrize(
    "error", [NotReady("given up"), CheckpointError("f", "cannot be read")], ids=["ended", "disk"]
)
def test_a_repeated_preparation_loads_only_the_rest(host: ExpertHost, error: Exception) -> None:
    num_layers = len(load_config(DEMO).moe_layers)
    wanted, total = [0, 1, 2, 3], 4 * num_layers
    first, second = Failing(host, 3, error), Failing(host, total, error)

    with pytest.raises(type(error)):
        host.loader.prepare(placement_of(host, 1, wanted), first)
    assert host.epochs.resident_bytes == 3 * host.files.expert_bytes
    result = host.loader.prepare(placement_of(host, 2, wanted), second)

    assert (result.loaded, result.kept) == (total - 3, 3)
    assert not set(first.loaded) & set(second.loaded), "loaded twice"
    assert host.epochs.resident_bytes == total * host.files.expert_bytes


def test_what_the_next_placement_does_not_name_is_freed_first(host: ExpertHost) -> None:
    with pytest.raises(NotReady):
        host.loader.prepare(placement_of(host, 1, [0, 1]), Failing(host, 2, NotReady("given up")))
    host.loader.max_expert_bytes = len(load_config(DEMO).moe_layers) * host.files.expert_bytes

    host.loader.prepare(placement_of(host, 2, [3]))

    assert host.epochs.resident_bytes == len(load_config(DEMO).moe_layers) * host.files.expert_bytes


def test_an_aborted_epoch_is_not_loaded_again(host: ExpertHost) -> None:
    host.loader.prepare(placement_of(host, 1, [0, 1]))
    host.loader.abort(1)
    result = host.loader.prepare(placement_of(host, 2, [0, 1]))
    assert result.loaded == 0
    host.loader.abort(1)  # long gone
    host.epochs.commit(2)
    host.loader.abort(2)  # in force
    assert host.epochs.answers(2)


def test_kept_experts_compute_the_same_as_fresh_ones(host: ExpertHost) -> None:
    layer = load_config(DEMO).moe_layers[0]
    with pytest.raises(NotReady):
        host.loader.prepare(placement_of(host, 1, [0, 1]), Failing(host, 1, NotReady("given up")))
    host.loader.prepare(placement_of(host, 2, [0, 1]))
    for expert in (0, 1):
        held, fresh = host.epochs.held(layer, expert), host.files.bring(LoadPace())(layer, expert)
        assert held is not None
        assert torch.equal(held.packed, fresh.packed)  # type: ignore[arg-type]  # there is one


def test_without_a_preparation_they_are_let_go() -> None:
    now_s = [0.0]
    kept = KeptExperts(lambda expert: None, lambda: now_s[0])
    expert: Any = object()
    with kept.preparing():
        kept.put((0, 1), expert)
        now_s[0] = 10 * KEEP_S
        kept.expire()
        assert (0, 1) in kept
    kept.expire()
    assert (0, 1) in kept
    now_s[0] += KEEP_S + 1
    kept.expire()
    assert len(kept) == 0


def test_progress_counts_every_byte_once(host: ExpertHost) -> None:
    files, seen = host.files, []
    bring = files.bring(LoadPace())

    def look(layer: int, expert: int) -> LoadedExpert:
        loaded = bring(layer, expert)
        seen.append(files.progress.look())
        return loaded

    host.loader.prepare(placement_of(host, 1, [0, 1]), look)
    layers = load_config(DEMO).moe_layers
    total = sum(files.experts.stored_bytes(layer, e) for layer in layers for e in (0, 1))
    assert files.progress.look() is None
    assert max(each.done for each in seen if each) <= total
    assert {each.total for each in seen if each} == {total}
