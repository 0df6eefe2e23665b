"""All workers of a dispatch assign its experts alike, and each choice has exactly one of them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common.placements import placed_worker
from moesaic.errors import ExpertUnavailable, InvalidInput
from moesaic.experts.assignment import Assigner, decision_digest, has_choice, serving_workers
from moesaic.experts.basis import MAX_LOAD, AssignmentBasis, all_schedulings
from moesaic.messages.placement import Placement
from moesaic.messages.scheduling import ExpertScheduling

NUM_EXPERTS = 6
CPU = torch.device("cpu")
LAYER = 3


def placement_of(slots: list[list[int]], ridges: Sequence[int] = ()) -> Placement:
    return Placement(
        epoch=1,
        model_digest="",
        num_experts=NUM_EXPERTS,
        workers=[
            placed_worker(f"w{n}", ridge_rows=ridges[n] if ridges else 0) for n in range(len(slots))
        ],
        layers=[1, LAYER],
        slots=[[[] for _ in slots], slots],
    )


@st.composite
def held_somewhere(draw: st.DrawFn, num_experts: int) -> list[list[int]]:
    """Draw the experts of one to four workers, each on one of them at least."""
    num_workers = draw(st.integers(1, 4))
    holders = st.sets(st.integers(0, num_workers - 1), min_size=1)
    held = [draw(holders) for _ in range(num_experts)]
    return [[e for e in range(num_experts) if n in held[e]] for n in range(num_workers)]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Every expert is somewhere; slots are in any order, some empty, some twice the same."""
    slots = draw(held_somewhere(NUM_EXPERTS))
    for experts in slots:
        experts.extend(draw(st.lists(st.integers(-1, NUM_EXPERTS - 1), max_size=2)))
    ridges = draw(st.lists(st.sampled_from([0, 2, 4]), min_size=len(slots), max_size=len(slots)))
    return placement_of([draw(st.permutations(experts)) for experts in slots], ridges)


batches = st.lists(
    st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=2, max_size=2, unique=True), max_size=12
).map(lambda rows: torch.tensor(rows, dtype=torch.int32).view(-1, 2))


@settings(deadline=None, max_examples=300)
@given(placements(), batches, st.sampled_from(all_schedulings()), st.data())
def test_each_choice_has_one_worker_that_holds_its_expert_and_all_agree(
    placement: Placement, topk_ids: torch.Tensor, policy: ExpertScheduling, data: st.DataObject
) -> None:
    num_workers = len(placement.workers)
    everyone = tuple(range(num_workers))
    loads = st.lists(st.integers(0, 5), min_size=num_workers, max_size=num_workers)
    load = data.draw(st.none() | loads)
    slots = placement.slots[1]

    assignments = [
        Assigner(placement, LAYER, n, policy, everyone, CPU).assign(topk_ids, load, b"seed")
        for n in everyone
    ]

    assert len({decision_digest(1, LAYER, 1.0, topk_ids, s.served) for s in assignments}) == 1
    computed = torch.stack([assignment.slot_ids >= 0 for assignment in assignments])
    assert bool((computed.sum(dim=0) == 1).all())
    for n, assignment in enumerate(assignments):
        assert assignment.slot_ids.dtype == torch.int32
        own = {int(e) for e in topk_ids[assignment.slot_ids >= 0]}
        assert assignment.num_experts == len(own)
        for expert, slot in zip(topk_ids.flatten(), assignment.slot_ids.flatten(), strict=True):
            assert slot == -1 or slots[n][slot] == expert
    assert {assignment.most_experts for assignment in assignments} == {
        max(s.num_experts for s in assignments)
    }
    serving = serving_workers(placement, LAYER, policy, everyone)
    assert {n for n, assignment in enumerate(assignments) if assignment.num_experts} <= set(
        serving.workers if serving else ()
    )


@settings(deadline=None)
@given(placements(), batches, st.integers(0, 9))
def test_by_the_placement_alone_no_row_moves_whatever_is_beside_it(
    placement: Placement, topk_ids: torch.Tensor, part: int
) -> None:
    for policy in ("static", "first"):
        assigner = Assigner(placement, LAYER, 0, policy, range(len(placement.workers)), CPU)

        whole = assigner.assign(topk_ids, None, b"")
        alone = assigner.assign(topk_ids[part:], [7] * len(placement.workers), b"other")

        assert torch.equal(whole.slot_ids[part:], alone.slot_ids)


def test_what_others_still_have_to_do_turns_experts_away() -> None:
    placement = placement_of([list(range(NUM_EXPERTS)), list(range(NUM_EXPERTS))])
    topk_ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    assigner = Assigner(placement, LAYER, 0, "aebs", (0, 1), CPU)

    assert assigner.assign(topk_ids, None, b"").num_experts == 2
    busy = assigner.assign(topk_ids, [2, 0], b"")

    assert (busy.num_experts, busy.most_experts) == (1, 3)
    assert busy.load.tolist() == [3, 3]


def test_loads_are_those_of_the_live_alone() -> None:
    everything = list(range(NUM_EXPERTS))
    placement = placement_of([everything] * 3)
    topk_ids = torch.tensor([[0, 1]], dtype=torch.int32)

    assignment = Assigner(placement, LAYER, 2, "aebs", (0, 2), CPU).assign(topk_ids, [5, 0], b"")

    assert assignment.load.tolist() == [5, 0, 2]


@pytest.mark.parametrize(("ridges", "own"), [((4, 4), 3), ((4, 16), 3), ((16, 16), 2), ((4, 0), 2)])
def test_rows_count_beyond_the_least_ridge_that_all_have_measured(
    ridges: tuple[int, int], own: int
) -> None:
    placement = placement_of([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3]], ridges)
    # Expert 0 has thirteen choices, three others one each.
    topk_ids = torch.tensor([[0, 1], [0, 2], [0, 3], *[[0, 0]] * 5], dtype=torch.int32)

    assignment = Assigner(placement, LAYER, 0, "aebs", (0, 1), CPU).assign(topk_ids, None, b"")

    assert max(assignment.num_experts, 4 - assignment.num_experts) == own
    assert assignment.num_experts + (assignment.served == 1).sum() == 4


@pytest.mark.parametrize("policy", all_schedulings())
def test_an_expert_that_nobody_holds_is_refused_where_a_row_wants_it(
    policy: ExpertScheduling,
) -> None:
    placement = placement_of([[0, 1, 2, 3], [4, 5]])
    assigner = Assigner(placement, LAYER, 0, policy, (0,), CPU)

    assert assigner.assign(torch.tensor([[0, 1]], dtype=torch.int32), None, b"").num_experts == 2
    with pytest.raises(ExpertUnavailable, match="2 expert") as refused:
        assigner.assign(torch.tensor([[0, 5], [4, 1], [5, 2]], dtype=torch.int32), None, b"")
    assert refused.value.layer == LAYER
    assert serving_workers(placement, LAYER, policy, (0,)) is None


def test_there_is_a_choice_only_where_several_who_live_hold_the_same() -> None:
    placement = placement_of([[0, 1, 2, -1, 0], [3, 4, 5, -1], [0]])

    assert has_choice(placement, LAYER, (0, 1, 2))
    assert not has_choice(placement, LAYER, (0, 1))


FACTS = {
    "epoch": 3,
    "layer": 2,
    "threshold": 1.0,
    "topk_ids": torch.tensor([[0, 1]], dtype=torch.int32),
    "served": np.array([0, 1], np.int32),
}


@pytest.mark.parametrize(
    "changed",
    [
        {"epoch": 4},
        {"layer": 3},
        {"threshold": 0.5},
        {"topk_ids": torch.tensor([[1, 0]], dtype=torch.int32)},
        {"topk_ids": torch.tensor([[0], [1]], dtype=torch.int32)},
        {"served": np.array([0, 0], np.int32)},
        {"served": np.array([[0, 1]], np.int32)},
    ],
)
def test_a_digest_shows_every_difference(changed: dict) -> None:
    assert decision_digest(**FACTS) == decision_digest(**FACTS)
    assert decision_digest(**FACTS) != decision_digest(**{**FACTS, **changed})


def test_a_digest_stays_the_same_on_every_machine() -> None:
    assert decision_digest(**FACTS) == 3614299589166896102


terms = st.builds(
    AssignmentBasis,
    st.sampled_from(all_schedulings()),
    st.sets(st.integers(0, 9), min_size=1).map(lambda live: tuple(sorted(live))),
)


@given(terms, st.booleans(), st.data())
def test_terms_come_back_as_they_were(
    each: AssignmentBasis, loaded: bool, data: st.DataObject
) -> None:
    if loaded:
        size = len(each.live)
        load = data.draw(st.lists(st.integers(0, MAX_LOAD), min_size=size, max_size=size))
        each = replace(each, load=tuple(load))

    assert AssignmentBasis.decode(each.encode(), 10) == each


@pytest.mark.parametrize(
    "encoded",
    [
        torch.tensor([[0, 0, 1]], dtype=torch.int32),
        torch.tensor([[0.0, 0.0]]),
        torch.tensor([0, 0, 1]),
        torch.empty(0, 3, dtype=torch.int64),
        torch.zeros(3, 3, dtype=torch.int64),
        torch.empty(1, 0, dtype=torch.int64),
        torch.tensor([[0]]),
        torch.tensor([[len(all_schedulings()), 0]]),
        torch.tensor([[-1, 0]]),
        torch.tensor([[0, 1, 0]]),
        torch.tensor([[0, 1, 1]]),
        torch.tensor([[0, -1, 1]]),
        torch.tensor([[0, 1, 3]]),
        torch.tensor([[0, 0, 1], [1, 0, 0]]),
        torch.tensor([[0, 0, 1], [0, -1, 0]]),
        torch.tensor([[0, 0, 1], [0, MAX_LOAD + 1, 0]]),
    ],
    ids=str,
)
def test_terms_that_are_none_are_refused_by_field(encoded: torch.Tensor) -> None:
    with pytest.raises(InvalidInput) as refused:
        AssignmentBasis.decode(encoded, 3)

    assert refused.value.field == "frame.tensors[1]"
