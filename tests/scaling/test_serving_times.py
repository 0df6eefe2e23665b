"""Seconds of a step by the costs of its parts, and the wait for experts that others use as well."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import InvalidInput
from moesaic.messages.performance import PART_TERMS, Part, PartCost, PerformanceModel
from moesaic.messages.scaling import FleetShape
from moesaic.scaling import ServingTimes
from moesaic.scaling.contract import StepRows
from moesaic.scaling.serving_times import time_at_station

LAYERS, NUM_EXPERTS, TOP_K, ROW_BYTES = 4, 8, 2, 1000.0
ROWS = StepRows(prompt_rows=8, answer_rows=2, keys=100)


def cost_of(part: Part, *unit_s: float, error_s: float = 0.0) -> PartCost:
    n = len(PART_TERMS[part])
    covariance = [[error_s**2 if i == j == 0 else 0.0 for j in range(n)] for i in range(n)]
    return PartCost(
        terms=PART_TERMS[part],
        unit_s=unit_s,
        covariance=tuple(map(tuple, covariance)) if error_s else (),
    )


APART = PerformanceModel(
    parts={
        "attention": cost_of("attention", 1.0, 0.1, 0.01),
        "experts": cost_of("experts", 0.5, 0.25, 0.0625),
        "link.inter": cost_of("link.inter", 0.125, 0.0625, 1e-5),
        "head": cost_of("head", 2.0, 0.5),
    }
)
WHOLE = PerformanceModel(parts={"step": cost_of("step", 1.0, 0.25, 0.1, 0.2, 0.01)})


def times_of(model: PerformanceModel, **more: object) -> ServingTimes:
    return ServingTimes(
        model,
        num_moe_layers=LAYERS,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        row_bytes=ROW_BYTES,
        activated=lambda num_workers, rows: 6.0 / num_workers,
        **more,  # type: ignore[arg-type]  # options of one test each
    )


def test_whole_steps_that_were_measured_correct_the_sum_of_parts() -> None:
    measured, other = FleetShape(1, 2), FleetShape(3, 4)
    sums = times_of(APART)
    off = 1.25
    step = cost_of("step", off * sums.step(ROWS, measured).seconds, 0.0, 0.0, 0.0, 0.0)
    both = PerformanceModel(parts=APART.parts | {"step": step})

    found = times_of(both, measured=measured)

    for shape in (measured, other):
        there, here = sums.step(ROWS, shape), found.step(ROWS, shape)
        assert here.seconds == pytest.approx(off * there.seconds)
        assert (here.attention_s, here.experts_s) == (there.attention_s, there.experts_s)
    none = times_of(both, measured=FleetShape(1, 0)).step(ROWS, other)
    assert none == sums.step(ROWS, other)


def test_whole_steps_correct_a_sum_of_parts_by_a_factor_of_two_at_most() -> None:
    shape = FleetShape(1, 2)
    sums = times_of(APART).step(ROWS, shape)
    step = cost_of("step", 10 * sums.seconds, 0.0, 0.0, 0.0, 0.0)

    found = times_of(PerformanceModel(parts=APART.parts | {"step": step}), measured=shape).step(
        ROWS, shape
    )

    assert found.seconds == pytest.approx(2 * sums.seconds)


def test_a_lone_attention_worker_waits_for_nobody_else() -> None:
    found = times_of(APART).step(ROWS, FleetShape(1, 2))

    attention_s = 1.0 + 10 * 0.1 + 100 * 0.01 + (2.0 + 3 * 0.5)  # of 2 answers and a prompt: logits
    experts_s = 0.5 + 3 * 0.25 + 10 * TOP_K / 2 * 0.0625
    exchange_s = 2 * 0.125 + 4 * 0.0625 + 2 * 2 * 10 * ROW_BYTES * 1e-5  # to both expert workers
    assert found.attention_s == pytest.approx(attention_s)
    assert found.experts_s == pytest.approx(LAYERS * experts_s)
    assert found.seconds == pytest.approx(attention_s + LAYERS * (exchange_s + experts_s))


def test_more_attention_workers_wait_for_each_other_at_the_experts() -> None:
    times = times_of(APART)

    seconds = [times.step(ROWS, FleetShape(m, 2)).seconds for m in (1, 2, 4, 64)]

    assert seconds == sorted(seconds)
    # With many of them, experts are the bottleneck: a step lasts as long as they need for all.
    experts_s = times.step(ROWS, FleetShape(1, 2)).experts_s
    assert seconds[-1] == pytest.approx(64 * experts_s, rel=0.02)


def test_an_activated_expert_has_a_row_at_least() -> None:
    few = times_of(APART).step(StepRows(0, 1, 0), FleetShape(1, 2))

    assert few.experts_s == pytest.approx(LAYERS * (0.5 + 3 * 0.25 + 3 * 0.0625))


@pytest.mark.parametrize("shape", [FleetShape(1, 0), FleetShape(3, 0), FleetShape(2, 4)])
def test_where_only_whole_steps_are_known_experts_are_part_of_them(shape: FleetShape) -> None:
    found = times_of(WHOLE).step(ROWS, shape)

    experts_s = 0.25 * 8 * (1 - 0.75**10)  # of ten rows, two of eight each
    assert found.seconds == found.attention_s == pytest.approx(1.0 + experts_s + 0.8 + 0.4 + 1.0)
    assert found.experts_s == 0.0


def test_links_inside_a_node_count_where_those_between_nodes_are_not_known() -> None:
    parts = dict(APART.parts)
    parts["link.intra"] = parts.pop("link.inter")

    assert times_of(PerformanceModel(parts=parts)).step(ROWS, FleetShape(2, 2)) == times_of(
        APART
    ).step(ROWS, FleetShape(2, 2))


def test_errors_of_parts_make_the_error_of_a_step() -> None:
    parts = APART.parts | {
        "attention": cost_of("attention", 1.0, 0.1, 0.01, error_s=0.3),
        "experts": cost_of("experts", 0.5, 0.25, 0.0625, error_s=0.1),
    }
    times = times_of(PerformanceModel(parts=parts))

    one, many = (times.step(ROWS, FleetShape(m, 2)) for m in (1, 8))

    assert one.error_s == pytest.approx(np.hypot(0.3, LAYERS * 0.1))
    assert many.error_s > one.error_s
    assert times_of(APART).step(ROWS, FleetShape(1, 2)).error_s == 0.0


@given(st.integers(1, 30), st.floats(0.01, 10), st.floats(0, 10))
def test_time_at_a_station_is_between_the_bounds_of_any_closed_network(
    num_clients: int, service_s: float, elsewhere_s: float
) -> None:
    found = time_at_station(num_clients, service_s, elsewhere_s)

    least = max(service_s, num_clients * service_s - elsewhere_s)
    assert least * (1 - 1e-9) <= found <= num_clients * service_s * (1 + 1e-9)


@pytest.mark.parametrize(("service_s", "elsewhere_s"), [(1.0, 1.0), (0.2, 3.0), (2.0, 0.5)])
def test_time_at_a_station_is_that_of_the_markov_chain(
    service_s: float, elsewhere_s: float
) -> None:
    # States are clients at the station; those elsewhere return one by one (exponential as well).
    num_clients = 4
    weights = [1.0]
    for there in range(num_clients):
        weights.append(weights[-1] * (num_clients - there) * service_s / elsewhere_s)
    chance = np.array(weights) / sum(weights)

    throughput = (1 - chance[0]) / service_s
    mean = float(np.arange(num_clients + 1) @ chance)
    assert time_at_station(num_clients, service_s, elsewhere_s) == pytest.approx(mean / throughput)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": PerformanceModel(parts={"attention": APART.parts["attention"]})}, "model"),
        ({"num_moe_layers": 0}, "num_moe_layers"),
        ({"num_experts": 0}, "num_experts"),
        ({"top_k": 0}, "top_k"),
    ],
)
def test_costs_and_sizes_that_make_no_sense_are_refused(
    change: dict[str, object], field: str
) -> None:
    usual: dict[str, object] = {
        "model": APART,
        "num_moe_layers": LAYERS,
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "row_bytes": ROW_BYTES,
        "activated": lambda num_workers, rows: 1.0,
    }

    with pytest.raises(InvalidInput) as caught:
        ServingTimes(**(usual | change))  # type: ignore[arg-type]  # one of them is wrong

    assert caught.value.field == field


@pytest.mark.parametrize("shape", [FleetShape(0, 1), FleetShape(1, 0)])
def test_shapes_that_costs_say_nothing_about_are_refused(shape: FleetShape) -> None:
    with pytest.raises(InvalidInput) as caught:
        times_of(APART).step(ROWS, shape)

    assert caught.value.field == "shape"
