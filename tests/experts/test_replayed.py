"""What a replay says of a batch is what workers would do with it: predictions rest on that."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.experts.assignment import Assigner
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.placement.evaluation.replay import replay
from tests.experts.test_assignment import held_somewhere

NUM_EXPERTS, TOP_K = 8, 3


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Every expert is somewhere, many are in several places."""
    slots = draw(held_somewhere(NUM_EXPERTS))
    ridges = draw(st.lists(st.sampled_from([1, 2, 8]), min_size=len(slots), max_size=len(slots)))
    workers = [placed_worker(f"w{n}", ridge_rows=ridge) for n, ridge in enumerate(ridges)]
    return placement_of(workers, slots, [0], NUM_EXPERTS, model_digest="")


rows = st.permutations(range(NUM_EXPERTS)).map(lambda order: order[:TOP_K])


@pytest.mark.parametrize("scheduling", ["aebs", "aebs-memory-bound", "static"])
@settings(deadline=None, max_examples=100)
@given(placement=placements(), chosen=st.lists(rows, min_size=1, max_size=30))
def test_a_replay_decides_as_workers_do(
    scheduling: ExpertScheduling, placement: Placement, chosen: list[list[int]]
) -> None:
    topk_ids = torch.tensor(chosen, dtype=torch.int32)
    everyone = range(len(placement.workers))
    assigner = Assigner(placement, 0, 0, scheduling, everyone, torch.device("cpu"))

    assignment = assigner.assign(topk_ids, None, b"")

    counts = np.bincount(topk_ids.flatten().numpy(), minlength=NUM_EXPERTS)
    ridges = [worker.ridge_rows for worker in placement.workers]
    (found,) = replay([placement.slots], [counts[None]], scheduling, ridges)
    assert found.max_activated == assignment.most_experts
    assert found.max_load == assignment.load.max()
