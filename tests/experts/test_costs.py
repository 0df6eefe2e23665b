from typing import Any

import pytest
import torch

from moesaic.cluster.placements import decode_placement, encode_placement
from moesaic.costs import fitted
from moesaic.experts.costs import (
    ExpertBatch,
    ExpertCosts,
    experts_cost,
    measure_experts,
    ridge_of,
)
from moesaic.messages.performance import PART_TERMS, PartCost
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.models.configuration.config import load_config
from moesaic.placement.decide.proposal import propose


@pytest.mark.parametrize(
    ("weights_s", "row_s", "ridge"),
    [(8.0, 1.0, 8), (11.0, 1.0, 8), (12.0, 1.0, 16), (0.1, 1.0, 1), (1.0, 0.0, 0), (0.0, 1.0, 0)],
)
def test_a_ridge_is_a_power_of_two(weights_s: float, row_s: float, ridge: int) -> None:
    cost = PartCost(terms=PART_TERMS["experts"], unit_s=(0.0, weights_s, row_s))

    assert ridge_of(cost) == ridge


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_ridge_is_measured_on_the_kernel_of_the_experts(
    tiny_model: Any, quantization: Any
) -> None:
    config = load_config(tiny_model.directory)

    batches = measure_experts(config, torch.float32, torch.device("cpu"), quantization)

    assert all(batch.seconds > 0 for batch in batches)
    ridge = ridge_of(experts_cost(batches))
    assert ridge == 0 or ridge & (ridge - 1) == 0


def test_batches_of_all_kinds_make_one_cost() -> None:
    costs = ExpertCosts()
    for rows in (1, 16, 48):
        costs.note(ExpertBatch(4, 4 * rows, 4e-3 + 4e-4 * rows))
    costs.note(ExpertBatch(2, 2, 2.2e-3))

    for _ in range(2):  # what is known stays
        cost = fitted(PART_TERMS["experts"], costs.take(None)["experts"])
        assert cost.seconds(1, 8, 8) == pytest.approx(8.8e-3, rel=0.02)


def test_what_a_worker_measured_reaches_all_workers_with_the_placement() -> None:
    record = WorkerRecord(
        worker_id="e",
        generation=1,
        role="expert",
        state="ready",
        admin_address="h:1",
        data_address="h:2",
        model_digest="d",
        slots_per_layer=2,
        num_experts=2,
        layers=[0],
        ridge_rows=8,
    )

    proposal = propose(None, [record]).placement

    assert isinstance(proposal, Placement)
    assert [worker.ridge_rows for worker in proposal.workers] == [8]
    wire = encode_placement(proposal)
    wire.epoch = 1
    assert decode_placement(wire).workers == proposal.workers
