"""Migrations pay where they save more seconds than they take, and enough of them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.common.placements import placed_worker
from moesaic.errors import InvalidInput
from moesaic.messages.placement import Placement
from moesaic.placement.decide.worth import MigrationCase

NUM_EXPERTS = 4


def placement(*slots: list[int], names: str = "ab", generation: int = 1) -> Placement:
    return Placement(
        epoch=1,
        model_digest="m",
        num_experts=NUM_EXPERTS,
        workers=[placed_worker(n, generation=generation) for n in names],
        layers=[7],
        slots=[[list(experts) for experts in slots]],
    )


def case(**fields: Any) -> MigrationCase:
    """The example of the docstring, and a second origin without demand."""
    demand = np.zeros((2, 1, NUM_EXPERTS))
    demand[0, 0] = [50, 0, 50, 50]
    return MigrationCase(
        **{
            "origins": ["a", "b"],
            "demand": demand,
            "remote_s": np.array([0.003, 0.9]),
            "local_s": np.array([0.001, 0.1]),
            "bytes_per_s": np.array([50e6, 50e6]),
            "load_share": 0.5,
            "expert_bytes": 10**9,
            "slowdown": 0.1,
            "busy_s_per_s": 2.0,
            "interval_s": 300.0,
            "least_gain": 0.1,
            **fields,
        }
    )


CURRENT, TARGET = placement([0, 1], [2, 3, 1]), placement([0, 1, 2, -1], [2, 3])


def test_the_example_of_the_docstring_holds() -> None:
    found = case().verdict(CURRENT, TARGET)

    assert found.cost_before_s == pytest.approx(60)
    assert found.cost_after_s == pytest.approx(30)
    assert found.transfer_s == pytest.approx(40)
    assert found.migration_s == pytest.approx(8)
    assert found.gain_s == pytest.approx(22)
    assert found.pays
    assert "22.00 s" in found.reason
    assert found.local_share_before == pytest.approx(1 / 3)
    assert found.local_share_after == pytest.approx(2 / 3)
    assert found.row_s_before == pytest.approx((50 * 0.001 + 100 * 0.003) / 150)
    assert found.row_s_after == pytest.approx((100 * 0.001 + 50 * 0.003) / 150)


@pytest.mark.parametrize(
    ("fields", "pays"),
    [
        ({"least_gain": 22 / 60 - 1e-9}, True),
        ({"least_gain": 22 / 60 + 1e-9}, False),
        ({"slowdown": 0.37, "least_gain": 0.0}, True),
        ({"slowdown": 0.375, "least_gain": 0.0}, False),  # saves exactly nothing
        ({"interval_s": 80.0, "least_gain": 0.0}, False),
        ({"remote_s": np.array([0.001, 0.9])}, False),  # what is elsewhere is as near
        ({"remote_s": np.array([0.0, 0.9])}, False),  # or nearer
        ({"demand": np.zeros((2, 1, NUM_EXPERTS))}, False),
    ],
)
def test_a_migration_pays_from_some_point_on(fields: dict[str, Any], pays: bool) -> None:
    assert case(**fields).verdict(CURRENT, TARGET).pays is pays


def test_without_demand_all_predictions_are_finite() -> None:
    found = case(demand=np.zeros((2, 1, NUM_EXPERTS))).verdict(CURRENT, TARGET)

    assert (found.cost_before_s, found.cost_after_s, found.row_s_before) == (0, 0, 0)
    assert (found.local_share_before, found.local_share_after) == (1, 1)


def test_the_busiest_link_counts() -> None:
    target = placement([0, 1, 2, 3], [2, 3, 0])

    together = case(bytes_per_s=np.array([50e6, 50e6])).verdict(CURRENT, target)
    slow = case(bytes_per_s=np.array([50e6, 5e6])).verdict(CURRENT, target)

    assert together.transfer_s == pytest.approx(80)  # two experts to a, one to b
    assert slow.transfer_s == pytest.approx(400)


def test_dropping_alone_is_no_migration() -> None:
    found = case(least_gain=0.0).verdict(CURRENT, placement([0, 1], [2, 3]))

    assert (found.transfer_s, found.pays) == (0, False)
    assert found.reason == "no expert would have to move"


def test_what_a_worker_held_before_it_restarted_is_not_local() -> None:
    found = case().verdict(CURRENT, placement([0, 1], [2, 3], generation=2))

    assert found.local_share_before == 0
    assert found.local_share_after == pytest.approx(1 / 3)
    assert found.transfer_s == pytest.approx(80)


def test_united_experts_make_nothing_local() -> None:
    with_united = replace(CURRENT, num_experts=5, num_united=1, slots=[[[0, 1, 4], [2, 3, 1]]])

    found = case().verdict(with_united, with_united)

    assert found.local_share_before == pytest.approx(1 / 3)


def test_origins_without_experts_have_all_rows_elsewhere() -> None:
    alone = placement([0, 1, 2, 3], names="b")

    found = case().verdict(alone, alone)

    assert found.local_share_before == 0


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_costs_are_those_of_a_plain_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    demand = rng.random((2, 1, NUM_EXPERTS)) * 100
    remote_s, local_s = rng.random(2), rng.random(2)
    held = [sorted(set(rng.integers(0, NUM_EXPERTS, 3).tolist())) for _ in range(2)]

    found = case(demand=demand, remote_s=remote_s, local_s=local_s).verdict(
        placement(*held), TARGET
    )

    plain = 0.0
    for n in range(2):
        for e in range(NUM_EXPERTS):
            if e not in held[n]:
                plain += 300 * demand[n, 0, e] * (remote_s[n] - local_s[n])
    assert found.cost_before_s == pytest.approx(plain)
    saved = found.cost_before_s - found.cost_after_s - found.migration_s
    assert found.gain_s == pytest.approx(saved)
    row_s_lost = (found.row_s_before - found.row_s_after) * demand.sum() * 300
    assert row_s_lost == pytest.approx(found.cost_before_s - found.cost_after_s)
    if found.pays:
        assert found.cost_after_s + found.migration_s < found.cost_before_s


@pytest.mark.parametrize(
    "fields",
    [
        {"origins": ["a"]},
        {"origins": ["a", "a"]},
        {"origins": []},
        {"demand": np.zeros((2, 4))},
        {"demand": np.full((2, 1, 4), np.nan)},
        {"remote_s": np.array([0.1])},
        {"local_s": np.array([-0.1, 0.1])},
        {"bytes_per_s": np.array([0.0, 1.0])},
        {"bytes_per_s": np.array([np.inf, 1.0])},
        {"load_share": 0.0},
        {"load_share": 1.1},
        {"least_gain": float("nan")},
        {"interval_s": 0.0},
        {"interval_s": float("inf")},
        {"slowdown": -0.1},
        {"busy_s_per_s": float("nan")},
        {"expert_bytes": -1},
    ],
)
def test_what_cannot_be_measured_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        case(**fields)


@pytest.mark.parametrize(
    "target",
    [
        lambda: replace(TARGET, layers=[7, 8], slots=TARGET.slots * 2),
        lambda: placement([0, 1], [2, 3], [0], names="abc"),
    ],
)
def test_placements_that_do_not_fit_the_case_are_refused(target: Callable[[], Placement]) -> None:
    with pytest.raises(InvalidInput):
        case().verdict(CURRENT, target())
