"""Predictions beside measurements, where both are known."""

import numpy as np
import pytest

from benchmarks.simulate.bench import errors, measured, objectives_of, predicted
from benchmarks.simulate.load import TimedAnswer
from benchmarks.simulate.rounds import SECONDS, ServedLoad
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import RecentDemand, ServingLimits
from tests.scaling.fleets import EvenTimes

TIMES = EvenTimes(step_s=2.0**-5, row_s=0.0, key_s=0.0)


def load_of(answers: list[TimedAnswer]) -> ServedLoad:
    demand = RecentDemand(
        np.array([each.sent_s for each in answers]),
        np.array([each.prompt_tokens for each in answers]),
        np.array([each.answer_tokens for each in answers]),
        16.0,
    )
    return ServedLoad(TIMES, TIMES, ServingLimits(), demand, answers, 0.25, ended_s=16.0)


def alone(at_s: float) -> TimedAnswer:
    """A request that has the worker for itself, with steps of 1/32 s."""
    return TimedAnswer(10, 4, at_s, at_s, [at_s + (i + 1) / 32 for i in range(4)])


def test_a_suite_whose_steps_are_known_is_predicted_without_error() -> None:
    load = load_of([alone(at_s) for at_s in range(1, 16)])
    objectives = objectives_of(load)

    real = measured(load, objectives)
    found = errors(predicted(load, TIMES, FleetShape(1, 0), objectives), real)

    assert found == {
        "ttft_p90_ms": 0.0,
        "tpot_p90_ms": 0.0,
        "attainment": 0.0,
        "attention_busy": pytest.approx(4 / 32 - 0.25, abs=0.02),
    }


def test_requests_that_took_twice_the_calm_ones_are_late() -> None:
    objectives = objectives_of(load_of([alone(1.0)]))
    slow = TimedAnswer(10, 4, 1.0, 1.0, [1.0 + (i + 1) / 8 for i in range(4)])

    found = measured(load_of([alone(1.0), slow]), objectives)

    assert (found["attainment"], found["attention_busy"]) == (0.5, 0.25)


def test_a_measurement_ends_with_its_window_as_a_forecast_does() -> None:
    late = TimedAnswer(10, 4, 10.0, 10.0, [20.0, 21.0, 22.0, 23.0])
    cut = TimedAnswer(10, 4, 10.0, 10.0, [14.0, 15.0, 19.0, 23.0])
    objectives = objectives_of(load_of([alone(1.0)]))

    found = measured(load_of([late, cut]), objectives)

    assert (found["ttft_p90_ms"], found["tpot_p90_ms"]) == (6000.0, 1000.0)


def test_seconds_of_steps_are_read_from_the_metrics_of_a_worker() -> None:
    page = (
        'moesaic_step_seconds_bucket{le="0.1"} 3.0\nmoesaic_step_seconds_sum 1.5\n'
        'moesaic_layer_exchange_seconds_sum{way="direct"} 0.5\n'
    )

    assert dict(SECONDS.findall(page)) == {
        "moesaic_step_seconds": "1.5",
        "moesaic_layer_exchange_seconds": "0.5",
    }


@pytest.mark.parametrize("answers", [[], [TimedAnswer(10, 1, 1.0, 1.0, [1.5])]])
def test_a_load_without_later_tokens_has_no_error_of_them(answers: list[TimedAnswer]) -> None:
    objectives = objectives_of(load_of([alone(1.0)]))
    load = load_of(answers)

    found = errors(predicted(load, TIMES, FleetShape(1, 0), objectives), measured(load, objectives))

    assert "tpot_p90_ms" not in found
    assert ("ttft_p90_ms" in found) == bool(answers)
