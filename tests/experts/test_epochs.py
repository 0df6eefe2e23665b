"""The placements that an expert worker answers for: prepared, in force, followed by another."""

import time
from typing import Any

import pytest
import torch

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.errors import MoesaicError, PlacementInfeasible
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint

NUM_EXPERTS, LAYERS = 8, [0, 1, 2]


def opened(model: Any, max_expert_bytes: int = 0) -> ExpertHost:
    return ExpertHost(
        Checkpoint(model.directory),
        load_config(model.directory),
        "a",
        NUM_EXPERTS,
        torch.float32,
        torch.device("cpu"),
        max_expert_bytes=max_expert_bytes,
    )


def placement(model: Any, epoch: int, experts: list[int]) -> Placement:
    """These experts in every layer, all on the host."""
    return placement_of(
        [placed_worker("a")],
        [list(experts)],
        LAYERS,
        NUM_EXPERTS,
        epoch=epoch,
        model_digest=load_config(model.directory).digest,
    )


def test_what_does_not_fit_beside_what_is_in_force_is_refused(tiny_model: Any) -> None:
    size = opened(tiny_model).files.expert_bytes
    host = opened(tiny_model, max_expert_bytes=15 * size)
    first = placement(tiny_model, 1, [0, 1, 2, 3])  # four in each of three layers
    host.loader.prepare(first)
    host.epochs.commit(1)
    assert host.epochs.resident_bytes == 12 * size

    with pytest.raises(PlacementInfeasible) as refused:
        host.loader.prepare(placement(tiny_model, 2, [0, 1, 4, 5]))
    assert refused.value.missing_bytes == 3 * size
    host.loader.prepare(placement(tiny_model, 3, [0, 1, 2, 4]))
    assert host.epochs.resident_bytes == 15 * size


def test_what_was_prepared_and_overtaken_is_freed(tiny_model: Any) -> None:
    host = opened(tiny_model)
    host.loader.prepare(placement(tiny_model, 1, [0, 1]))
    host.epochs.commit(1)
    host.loader.prepare(placement(tiny_model, 2, [2, 3]))  # whoever wanted this has died
    host.loader.prepare(placement(tiny_model, 3, [0, 4]))

    with pytest.raises(MoesaicError):
        host.epochs.commit(2)
    assert host.epochs.held(0, 2) is None
    host.epochs.commit(3)
    assert host.epochs.resident_bytes == 9 * host.files.expert_bytes  # 0, 1 and 4 of three layers


def test_what_was_prepared_is_freed_when_whoever_leads_confirms_what_is_in_force(
    tiny_model: Any,
) -> None:
    host = opened(tiny_model)
    host.loader.prepare(placement(tiny_model, 1, [0, 1]))
    host.epochs.commit(1)
    host.loader.prepare(placement(tiny_model, 2, [2, 3]))  # whoever wanted this has died

    host.epochs.commit(1)
    assert host.epochs.resident_bytes == 6 * host.files.expert_bytes
    with pytest.raises(MoesaicError):
        host.epochs.commit(2)

    host.loader.prepare(placement(tiny_model, 3, [4, 5]))
    host.epochs.ask(3)  # a step does: it was committed, and Redis has forgotten it
    host.epochs.commit(1)
    assert host.epochs.held(0, 4) is not None


def test_to_learn_of_a_commit_late_frees_nothing_that_was_prepared_since(tiny_model: Any) -> None:
    host = opened(tiny_model)
    host.loader.prepare(placement(tiny_model, 1, [0, 1]))
    host.epochs.commit(1)
    second = placement(tiny_model, 2, [2, 3])
    host.loader.prepare(second)
    host.epochs.ask(2)  # a step does
    host.loader.prepare(
        placement(tiny_model, 4, [0, 4])
    )  # committed by now, but who tells of 2 does not know

    assert host.epochs.learn(second)
    assert host.epochs.in_force == 2
    assert host.epochs.placement(4) is not None
    assert not host.epochs.learn(second)
    assert not host.epochs.learn(placement(tiny_model, 4, [5, 6]))  # not the one that was prepared
    host.epochs.commit(4)
    assert not host.epochs.learn(second)
    assert host.epochs.in_force == 4


def test_an_epoch_that_steps_still_ask_for_is_kept_for_a_while(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = opened(tiny_model)
    for epoch in (1, 2):
        host.loader.prepare(placement(tiny_model, epoch, [0, epoch]))
        host.epochs.commit(epoch)
    monkeypatch.setattr("moesaic.experts.epochs.RETIRE_AFTER_S", -1.0)  # all of it is long ago
    monkeypatch.setattr("moesaic.experts.epochs.MAX_RETIRE_AFTER_S", 60.0)
    later_s = time.monotonic() + 10.0
    with monkeypatch.context() as later:
        later.setattr("moesaic.experts.epochs.time.monotonic", lambda: later_s)
        host.epochs.ask(1)

    host.epochs.retire()
    assert host.epochs.held(0, 1) is not None
    monkeypatch.setattr("moesaic.experts.epochs.MAX_RETIRE_AFTER_S", -1.0)
    host.epochs.retire()
    assert host.epochs.held(0, 1) is None
    assert host.epochs.held(0, 2) is not None
