import numpy as np
import pytest

from moesaic.errors import InvalidInput
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import Objectives, RecentDemand, StepRows
from moesaic.scaling.replay import forecast
from moesaic_lab.simulation.arrivals import RateCurve
from moesaic_lab.simulation.elastic.days import DecisionRule, decided, run_days, with_least_headroom
from moesaic_lab.simulation.elastic.demand import DemandSeries
from moesaic_lab.simulation.elastic.fleet_times import Hardware
from moesaic_lab.simulation.elastic.fleets import FleetFamily
from moesaic_lab.simulation.elastic.hardware import device_profile
from moesaic_lab.simulation.elastic.model_shapes import model_shape
from moesaic_lab.simulation.elastic.roofline import roofline
from moesaic_lab.simulation.elastic.serving import sample, serve
from moesaic_lab.simulation.elastic.steady import steady_flow
from moesaic_lab.simulation.elastic.throughput import batch_figure

OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.2, attainment=0.99)


@pytest.fixture(scope="module")
def family() -> FleetFamily:
    device, model = device_profile("h100"), model_shape("deepseek-v2")
    return FleetFamily.drawn(Hardware(device, model, roofline(device, model)))


def constant(rate: float, span_s: float = 600.0) -> DemandSeries:
    return DemandSeries.drawn(RateCurve.constant(rate, span_s), 1.0, 16, 256, seed=0)


def test_six_devices_are_the_fewest_that_hold_the_experts_of_deepseek_v2(
    family: FleetFamily,
) -> None:
    assert family.ours.times.least == FleetShape(1, 6)
    assert not family.ours.times.holds(FleetShape(1, 5))


def test_few_requests_are_served_by_the_paper_s_smallest_shape(family: FleetFamily) -> None:
    for batch in (4, 16):
        found = batch_figure(family.ours, batch, 144, 0.2, most=12)

        assert (found.shape, found.met) == (FleetShape(1, 6), True)


def test_a_tighter_target_takes_more_devices(family: FleetFamily) -> None:
    loose, tight = (batch_figure(family.ours, 64, 144, slo, most=24) for slo in (0.2, 0.04))

    assert tight.met
    assert tight.shape.total > loose.shape.total


def test_more_expert_workers_shorten_steps_and_none_of_the_parts_is_longer_than_all(
    family: FleetFamily,
) -> None:
    rows = StepRows(0, 64, 64 * 144)

    few, many = (family.ours.times.step(rows, FleetShape(1, n)) for n in (6, 12))

    assert many.seconds < few.seconds
    assert few.attention_s + few.experts_s < 2 * few.seconds


def test_aebs_and_two_phase_are_never_slower_than_doing_without(family: FleetFamily) -> None:
    for shape in (FleetShape(1, 8), FleetShape(8, 14)):
        rows = StepRows(0, 16, 16 * 144)
        ours = family.ours.times.step(rows, shape).seconds

        assert ours <= family.unbalanced.times.step(rows, shape).seconds
        assert ours <= family.direct.times.step(rows, shape).seconds


def test_brownout_shortens_steps_the_more_the_lower_its_threshold(family: FleetFamily) -> None:
    rows, shape = StepRows(0, 64, 64 * 144), FleetShape(1, 8)

    seconds = [
        fleet.times.step(rows, shape).seconds
        for fleet in (family.browned_out(0.4), family.browned_out(0.8), family.ours)
    ]

    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_an_instance_of_all_devices_needs_room_for_attention_on_each(family: FleetFamily) -> None:
    least = family.any_size.times.least

    assert least.experts == 0
    assert least.attention > family.ours.times.least.total


def test_a_model_that_no_device_has_room_for_is_refused() -> None:
    device, model = device_profile("cpu"), model_shape("deepseek-v2")

    with pytest.raises(InvalidInput, match="attention weights"):
        FleetFamily.drawn(Hardware(device, model, roofline(device, model)))


def test_a_steady_state_is_what_a_replay_of_single_requests_finds(family: FleetFamily) -> None:
    times, shape, rate = family.ours.times, FleetShape(1, 6), 20.0
    at_s = (np.arange(600) + 0.5) / rate
    ones = np.ones(600, np.int64)
    demand = RecentDemand(at_s, 16 * ones, 256 * ones, 30.0)

    replayed = forecast(demand, shape, times, times.limits(shape), OBJECTIVES)
    found = steady_flow(times, shape, rate, constant(rate))

    assert found is not None
    assert found.tpot_s == pytest.approx(replayed.tpot_p90_s, rel=0.05)


@pytest.mark.parametrize(("shape", "rate"), [((1, 6), 20.0), ((10, 7), 150.0)])
def test_a_sample_at_a_constant_rate_comes_to_the_steady_state(
    family: FleetFamily, shape: tuple[int, int], rate: float
) -> None:
    demand, fleet = constant(rate), family.ours

    found = sample(fleet, FleetShape(*shape), rate, demand, OBJECTIVES)

    steady = steady_flow(fleet.times, FleetShape(*shape), rate, demand)
    assert steady is not None
    assert found.tpot_p90_s == pytest.approx(steady.tpot_s, rel=0.05)
    assert serve(fleet, demand, [FleetShape(*shape)] * 600, OBJECTIVES) == 1.0


def test_requests_that_a_fleet_cannot_take_wait_and_are_late(family: FleetFamily) -> None:
    shape, demand = FleetShape(1, 6), constant(200.0)

    found = sample(family.ours, shape, 200.0, demand, OBJECTIVES)

    assert steady_flow(family.ours.times, shape, 200.0, demand) is None
    assert serve(family.ours, demand, [shape] * 600, OBJECTIVES) < 0.5
    assert found.ttft_p90_s > OBJECTIVES.ttft_s


def test_each_stretch_is_served_by_the_shape_in_force(family: FleetFamily) -> None:
    small, large, demand = FleetShape(1, 6), FleetShape(8, 14), constant(150.0)

    found = serve(family.ours, demand, [small] * 90 + [large] * 510, OBJECTIVES)

    late = float(demand.counts[:90].sum() / demand.counts.sum())
    assert 1 - late <= found < 1


@pytest.mark.parametrize("rate", [5.0, 60.0, 120.0])
def test_the_cheapest_shape_meets_the_targets_and_one_device_less_does_not(
    family: FleetFamily, rate: float
) -> None:
    demand, fleet = constant(rate), family.ours
    found = fleet.cheapest(rate, demand, OBJECTIVES)
    assert found is not None

    def meets(shape: FleetShape) -> bool:
        state = steady_flow(fleet.times, shape, rate * 1.03, demand)
        return state is not None and state.tpot_s <= OBJECTIVES.tpot_s

    assert steady_flow(fleet.times, found, rate, demand) is not None
    smaller = [s for s in fleet.shapes_up_to(found.total - 1) if s.total == found.total - 1]
    assert not any(meets(shape) for shape in smaller)


def test_decisions_know_nothing_of_what_comes_after_them(family: FleetFamily) -> None:
    calm, burst = constant(5.0, 1200.0), constant(5.0, 1200.0)
    burst.counts[600:] *= 20
    rule = DecisionRule(300.0)

    before, _ = decided(family.ours, calm, OBJECTIVES, rule, 5.0)
    after, _ = decided(family.ours, burst, OBJECTIVES, rule, 5.0)

    assert after[:3] == before[:3]
    assert after[3].total > before[3].total


def test_devices_on_their_way_are_paid_and_do_not_serve(family: FleetFamily) -> None:
    demand = constant(5.0, 1200.0)
    demand.counts[300:] *= 20

    days = run_days(family.ours, demand, OBJECTIVES, DecisionRule(300.0, delay_s=60.0), 5.0)

    assert days.shapes[659].total < days.devices[659] == days.devices[661]
    assert days.shapes[661].total == days.devices[661]


def test_more_headroom_is_taken_only_where_less_does_not_attain(family: FleetFamily) -> None:
    calm, rising = constant(50.0, 1200.0), constant(50.0, 1200.0)
    rising.counts[:] *= np.linspace(1.0, 2.4, 1200)

    low, _ = with_least_headroom(family.ours, calm, OBJECTIVES, DecisionRule(300.0), 50.0)
    high, days = with_least_headroom(family.ours, rising, OBJECTIVES, DecisionRule(300.0), 50.0)

    assert low < high
    assert days.attainment >= OBJECTIVES.attainment


def test_a_study_is_the_same_every_time(family: FleetFamily) -> None:
    def hours() -> float:
        demand = DemandSeries.drawn(RateCurve(np.array([5.0, 60.0]), 600.0), 1.0, 16, 256, seed=3)
        return run_days(family.ours, demand, OBJECTIVES, DecisionRule(300.0), 5.0).device_hours(1.0)

    assert hours() == hours()
