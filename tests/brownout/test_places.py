"""Steps that have rows for prompts left, but no place for another request: the queue that the control must see."""

from dataclasses import replace

import numpy as np
import pytest

from moesaic.brownout.control.contract import EXACT, StepTaken
from moesaic.brownout.control.grid import Demand, ThresholdGrid
from moesaic.brownout.control.predictive import Arrivals
from moesaic.brownout.control.speed import StepSpeed
from moesaic.messages.brownout import BrownoutPolicy
from tests.brownout.queue_model import Arrival, Engine, poisson, run

# Short prompts, and answers that take most of the time: places are all that lacks.
ENGINE = Engine(
    own_s=0.0045, prompt_s=0.0002, answer_s=0.0007, gain=0.5, step_rows=2048, most_answers=32
)
PROMPT, ANSWER = 40, 20
LEVELS = ([1.0, 0.5, 0.0], [1.0, 0.5, 0.0])


def measured_per_s(engine: Engine) -> float:
    """Requests that end each second while many wait."""
    requests = [Arrival(0.0, PROMPT, ANSWER) for _ in range(400)]
    run(BrownoutPolicy(mode="off"), requests, engine)
    return len(requests) / max(r.last_s for r in requests)


def speed_of(engine: Engine) -> StepSpeed:
    """What is learned of exact steps with all kinds of rows."""
    speed, rng = StepSpeed(), np.random.default_rng(0)
    for _ in range(200):
        rows, answers = int(rng.integers(0, 200)), int(rng.integers(0, 33))
        seconds = engine.own_s + engine.prompt_s * rows + engine.answer_s * answers
        speed.took(StepTaken(0.0, seconds, rows, answers))
    return speed


def demand(**changed: float) -> Demand:
    usual = Demand(
        backlog_rows=0.0,
        queue_age_s=0.0,
        arriving_rows_per_s=0.0,
        prompt_rows=PROMPT,
        step_rows=ENGINE.step_rows,
        answers=32,
        lacking_places=0,
        places=ENGINE.most_answers,
        requests_per_s=0.0,
        lasting_requests_per_s=0.0,
        answer_tokens=ANSWER,
        answer_variance=ANSWER**2 / 4,
        late_rows=[80] * 64,
        noise=1.0,
    )
    return replace(usual, **changed)


def grid(**changed: float) -> ThresholdGrid:
    return ThresholdGrid(speed_of(ENGINE), demand(**changed), LEVELS, EXACT)


@pytest.mark.parametrize("places", [4, 32])
def test_a_queue_for_places_takes_as_long_as_it_does(places: int) -> None:
    per_s = measured_per_s(replace(ENGINE, most_answers=places))

    assert grid(lacking_places=100, places=places).wait_s[0, 0] == pytest.approx(
        100 / per_s, rel=0.15
    )


def test_free_places_are_waited_for_by_nobody() -> None:
    assert not grid(lacking_places=-3).wait_s.any()
    assert not grid(
        lacking_places=100, answer_tokens=0
    ).wait_s.any()  # not known yet how long answers are


def test_where_nobody_answers_rows_alone_count() -> None:
    def scoring(lacking_places: int) -> np.ndarray:
        rows = 1000.0 * PROMPT
        return grid(
            lacking_places=lacking_places,
            backlog_rows=rows,
            answers=0,
            answer_tokens=1,
            answer_variance=0.0,
            places=10**6,
        ).wait_s

    np.testing.assert_allclose(scoring(0), scoring(1000), rtol=0.05)
    assert (scoring(4000) > 3 * scoring(0)).all()


def test_answers_of_any_length_are_known_by_mean_and_variance() -> None:
    arrivals, rng = Arrivals(), np.random.default_rng(0)
    for tokens in rng.integers(10, 31, 2000):
        arrivals.ended(int(tokens))

    assert arrivals.answer_tokens == pytest.approx(20, rel=0.15)
    assert arrivals.answer_variance == pytest.approx(37, rel=0.5)
    arrivals.ended(0)  # nobody divides by it


def test_requests_that_come_faster_than_they_end_will_wait() -> None:
    per_s = measured_per_s(ENGINE)
    steady_s = {
        s: grid(lasting_requests_per_s=s * per_s).steady_ttft_s for s in (0.5, 0.9, 1.0, 1.2)
    }

    assert steady_s[0.5][0, 0] == pytest.approx(grid().ttft_s(0.0)[0, 0])
    assert steady_s[0.5][0, 0] < steady_s[0.9][0, 0] < 1.0 < steady_s[1.2][0, 0]
    # 1.5 times as fast: there it is a rate like others.
    assert steady_s[1.0][2, 2] < 0.3 < steady_s[1.0][0, 0]


@pytest.mark.parametrize("share", [0.6, 0.8, 0.85])
def test_the_wait_of_a_steady_queue_is_not_less_nor_much_more_than_it_is(share: float) -> None:
    rate = share * measured_per_s(ENGINE)
    requests = poisson([(120.0, rate)], prompt=PROMPT, answer=ANSWER)
    run(BrownoutPolicy(mode="off"), requests, ENGINE)

    ttft_s = np.quantile([r.ttft_s for r in requests if r.ttft_s is not None], 0.9)
    predicted_s = grid(lasting_requests_per_s=rate).steady_ttft_s[0, 0]

    assert ttft_s < predicted_s < 2.5 * ttft_s


@pytest.mark.parametrize("share", [0.4, 0.5])
def test_long_answers_that_come_seldom_are_left_exact(share: float) -> None:
    """Within the time that arrivals are counted in come few: by chance twice as many as later."""
    slow = Engine(own_s=0.02, prompt_s=0.0002, answer_s=0.005, gain=0.5, most_answers=8)
    rate = share * 8 / (100 * (0.02 + 8 * 0.005))
    policy = BrownoutPolicy(mode="auto", slo_ttft_s=2.0, slo_tpot_s=0.15)
    found = run(policy, poisson([(200.0, rate)], prompt=PROMPT, answer=100), slow)

    assert found.mean_threshold(0.0, 200.0) > 0.97
    assert found.violations(policy)["late or refused"] < 0.02


def test_a_burst_of_answers_degrades_instead_of_waiting() -> None:
    rate = 0.57 * measured_per_s(ENGINE)
    rates = [(15.0, rate), (45.0, 2 * rate), (60.0, rate)]
    late = []
    for policy in (BrownoutPolicy(mode="off"), BrownoutPolicy(mode="auto")):
        found = run(policy, poisson(rates, prompt=PROMPT, answer=ANSWER), ENGINE)
        late.append(found.violations(policy, 15.0, 45.0)["late or refused"])

    assert late[0] > 0.7
    assert late[1] < 0.05
    assert found.back_to_exact_s(45.0) < 10
    assert found.mean_threshold(0.0, 15.0) > 0.95
