"""Stages keep every expert, fit into memory, and reach the target wherever that can be done."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.common.placements import placed_worker
from moesaic.errors import InvalidInput, PlacementInfeasible
from moesaic.messages.placement import Placement
from moesaic.placement.decide.moves import moves
from moesaic.placement.decide.stages import stages

Resident = tuple[int, int]  # layer and expert


def placement(
    *slots: dict[str, list[int]], num_experts: int, epoch: int = 0, generation: int = 1
) -> Placement:
    """``slots``: of each layer, experts by worker."""
    names = list(slots[0])
    return Placement(
        epoch=epoch,
        model_digest="m",
        num_experts=num_experts,
        workers=[placed_worker(n, generation=generation) for n in names],
        layers=[2 * i + 1 for i in range(len(slots))],
        slots=[[layer[n] for n in names] for layer in slots],
    )


def held(of: Placement) -> dict[str, set[Resident]]:
    return {
        worker.worker_id: {
            (layer, e)
            for layer, by_worker in zip(of.layers, of.slots, strict=True)
            for e in by_worker[n]
            if e >= 0
        }
        for n, worker in enumerate(of.workers)
    }


def require_stages(
    found: list[Placement], current: Placement, target: Placement, capacity: dict[str, int]
) -> None:
    assert found[-1] == target
    every = {(layer, e) for layer in target.layers for e in range(target.num_experts)}
    dropped: dict[str, set[Resident]] = {}
    states = [held(current), *map(held, found)]
    for before, after in pairwise(states):
        assert every <= set().union(*after.values())
        for name, now in after.items():
            was = before.get(name, set())
            assert len(was | now) <= capacity.get(name, len(was))
            assert not (now - was) & dropped.get(name, set())
        for name, was in before.items():
            dropped.setdefault(name, set()).update(was - after.get(name, set()))
    leavers = held(current).keys() - held(target).keys()
    for stage in found[:-1]:
        assert leavers <= held(stage).keys()
        assert stage.epoch == target.epoch
    for one, other in pairwise(states[1:]):
        assert one != other  # none is in vain


def reachable(current: Placement, target: Placement, capacity: dict[str, int]) -> bool:
    """Search all ways, one load or drop at a time, on which no expert of the target is dropped."""
    names = sorted(held(target))
    goal = tuple(frozenset(held(target)[name]) for name in names)
    start = tuple(frozenset(held(current)[name]) for name in names)
    every = sorted(set().union(*goal))
    open_, seen = [start], {start}
    while open_:
        state = open_.pop()
        if state == goal:
            return True
        for n, name in enumerate(names):
            for expert in every:
                if expert not in state[n]:
                    if len(state[n]) >= capacity[name]:
                        continue
                    then = state[n] | {expert}
                elif expert not in goal[n] and sum(expert in other for other in state) > 1:
                    then = state[n] - {expert}
                else:
                    continue
                next_ = (*state[:n], then, *state[n + 1 :])
                if next_ not in seen:
                    seen.add(next_)
                    open_.append(next_)
    return False


@st.composite
def migrations(
    draw: st.DrawFn, max_workers: int, max_experts: int, max_layers: int, comers: bool
) -> tuple[Placement, Placement, dict[str, int]]:
    num_experts, num_layers = draw(st.integers(1, max_experts)), draw(st.integers(1, max_layers))
    names = [f"w{n}" for n in range(draw(st.integers(1, max_workers)))]
    comer = ["new"] if comers and draw(st.booleans()) else []
    leaver = ["old"] if comers and draw(st.booleans()) else []

    def drawn(workers: list[str], epoch: int) -> Placement:
        layers = []
        for _ in range(num_layers):
            layer: dict[str, list[int]] = {name: [] for name in workers}
            for e in range(num_experts):
                at = draw(st.sets(st.sampled_from(workers), min_size=1, max_size=2))
                for name in at:
                    layer[name].append(e)
            for slots in layer.values():
                slots.extend([-1] * draw(st.integers(0, 1)))
            layers.append(layer)
        return placement(*layers, num_experts=num_experts, epoch=epoch)

    current, target = drawn(names + leaver, 4), drawn(names + comer, 0)
    capacity = {
        name: max(len(held(p).get(name, ())) for p in (current, target)) + draw(st.integers(0, 2))
        for name in names + comer
    }
    return current, target, capacity


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Placement, Placement, dict[str, int]]:
    """Full workers, or nearly so, that pass experts around."""
    names = [f"w{n}" for n in range(draw(st.integers(2, 4)))]
    num_experts = draw(st.integers(len(names), 5))

    def dealt(extra: int) -> Placement:
        order = draw(st.permutations(range(num_experts)))
        layer = {name: list(order[n :: len(names)]) for n, name in enumerate(names)}
        for _ in range(extra):
            name, e = draw(st.sampled_from(names)), draw(st.integers(0, num_experts - 1))
            layer[name] += [e] if e not in layer[name] else []
        return placement(layer, num_experts=num_experts)

    current, target = dealt(draw(st.integers(0, 1))), dealt(draw(st.integers(0, 2)))
    capacity = {name: max(len(held(p)[name]) for p in (current, target)) for name in names}
    return current, target, capacity


@settings(max_examples=250, deadline=None)
@given(migrations(max_workers=4, max_experts=6, max_layers=3, comers=True))
def test_every_stage_fits_and_covers_and_none_goes_back(
    case: tuple[Placement, Placement, dict[str, int]],
) -> None:
    current, target, capacity = case

    try:
        found = stages(current, target, capacity)
    except PlacementInfeasible:  # whether rightly, the next test tells
        return

    require_stages(found, current, target, capacity)


@settings(max_examples=150, deadline=None)
@given(exchanges() | migrations(max_workers=3, max_experts=4, max_layers=1, comers=False))
def test_only_what_cannot_be_done_is_refused(
    case: tuple[Placement, Placement, dict[str, int]],
) -> None:
    try:
        found = stages(*case)
    except PlacementInfeasible:
        assert not reachable(*case)
    else:
        require_stages(found, *case)


def test_with_room_for_all_there_is_one_stage() -> None:
    current = placement({"a": [0, 1], "b": [2, 3]}, num_experts=4)
    target = placement({"a": [2, 3], "b": [0, 1]}, num_experts=4)

    assert stages(current, target, {"a": 4, "b": 4}) == [target]
    assert stages(target, target, {"a": 2, "b": 2}) == [target]


def test_full_workers_that_swap_pass_each_other_by_one_free_place() -> None:
    current = placement({"a": [0, 1, 2], "b": [3, 4, 5]}, num_experts=6)
    target = placement({"a": [3, 4, 5], "b": [0, 1, 2]}, num_experts=6)
    capacity = {"a": 3, "b": 4}

    require_stages(stages(current, target, capacity), current, target, capacity)
    with pytest.raises(PlacementInfeasible) as raised:
        stages(current, target, {"a": 3, "b": 3})
    assert raised.value.missing_slots == 1


def test_a_third_worker_lends_its_room() -> None:
    current = placement({"a": [0, 1], "b": [2, 3], "c": []}, num_experts=4)
    target = placement({"a": [2, 3], "b": [0, 1], "c": []}, num_experts=4)
    capacity = {"a": 2, "b": 2, "c": 1}

    found = stages(current, target, capacity)

    require_stages(found, current, target, capacity)
    assert any(held(stage)["c"] for stage in found)


def test_the_last_free_place_is_not_filled_with_a_mere_copy() -> None:
    current = placement({"a": [0, 1], "b": [2, 3], "c": []}, num_experts=4)
    target = placement({"a": [2, 1], "b": [0, 3], "c": [1]}, num_experts=4)
    capacity = {"a": 2, "b": 2, "c": 1}

    require_stages(stages(current, target, capacity), current, target, capacity)


def test_duplicates_make_room_first() -> None:
    current = placement({"a": [0, 1], "b": [0, 2]}, num_experts=3)
    target = placement({"a": [0, 2], "b": [1, 0]}, num_experts=3)
    spare = placement({"a": [0, 1], "b": [1, 2]}, num_experts=3)
    capacity = {"a": 2, "b": 2}

    require_stages(stages(current, spare, capacity), current, spare, capacity)
    with pytest.raises(PlacementInfeasible):
        stages(current, target, capacity)


def test_what_is_worth_most_moves_first() -> None:
    current = placement({"a": [0], "b": [1, 2, 3]}, num_experts=4)
    target = placement({"a": [1, 2, 3], "b": [0, 1, 2, 3]}, num_experts=4)
    value = np.zeros((2, 1, 4))
    value[0, 0] = [9, 1, 3, 2]
    capacity = {"a": 3, "b": 4}

    found = stages(current, target, capacity, value)

    require_stages(found, current, target, capacity)
    assert held(found[0])["a"] == {(1, 2), (1, 3)}


def test_who_restarted_gets_back_what_nobody_has_first() -> None:
    current = placement({"a": [0, 1], "b": [2, 3]}, num_experts=4)
    again = [replace(current.workers[0], generation=2), current.workers[1]]
    target = replace(current, workers=again, slots=[[[2, 1, 0], [3, 2]]])

    assert stages(current, target, {"a": 3, "b": 2}) == [target]
    assert len(moves(current, target)) == 3


def test_leavers_stay_until_the_last_stage_and_load_nothing() -> None:
    current = placement({"a": [0, 1], "old": [2, 3, 4]}, num_experts=5)
    target = placement({"a": [0, 2], "new": [1, 3, 4]}, num_experts=5)
    capacity = {"a": 2, "new": 3}

    found = stages(current, target, capacity)

    require_stages(found, current, target, capacity)
    assert len(found) == 2
    assert held(found[0])["old"] <= {(1, 2), (1, 3), (1, 4)}


def test_what_cannot_be_staged_is_refused() -> None:
    current = placement({"a": [0, 1], "b": [2]}, num_experts=3)
    target = placement({"a": [0], "b": [1, 2]}, num_experts=3)

    for wrong, capacity, value in (
        (replace(target, model_digest="other"), {"a": 9, "b": 9}, None),
        (replace(target, layers=[5]), {"a": 9, "b": 9}, None),
        (replace(target, slots=[[[0], [1]]]), {"a": 9, "b": 9}, None),
        (target, {"a": 9}, None),
        (target, {"a": 9, "b": 9}, np.zeros((2, 1, 4))),
    ):
        with pytest.raises(InvalidInput):
            stages(current, wrong, capacity, value)
    with pytest.raises(PlacementInfeasible) as raised:
        stages(current, target, {"a": 1, "b": 0})
    assert raised.value.missing_slots == 3


def test_a_model_of_real_size_takes_few_stages() -> None:
    rng = np.random.default_rng(0)
    names, slots = ["a", "b", "c"], 26

    def dealt() -> Placement:
        layers = []
        for _ in range(26):
            order = rng.permutation(64)
            base = {name: order[n::3].tolist() for n, name in enumerate(names)}
            for name, mine in base.items():
                spare = [e for e in rng.permutation(64).tolist() if e not in mine]
                base[name] = sorted(mine + spare[: slots - len(mine)])
            layers.append(base)
        return placement(*layers, num_experts=64)

    current, target = dealt(), dealt()
    capacity = dict.fromkeys(names, slots * 26 + 52)

    found = stages(current, target, capacity, rng.random((3, 26, 64)))

    require_stages(found, current, target, capacity)
    assert len(found) <= 16  # some 400 loads of each worker, 52 at a time, are 8 at least
