"""Evidence of what lower thresholds bring: when it counts, and when it is asked for again."""

import math
from collections.abc import Iterator
from random import Random

from moesaic.brownout.control.contract import EXACT, QueueState, StepTaken, Thresholds
from moesaic.brownout.control.latencies import LatencyWindow
from moesaic.brownout.control.predictive import LEAST_GAIN, TRIAL_S, Arrivals, PredictiveControl
from moesaic.brownout.control.speed import LEARNS_AFTER, StepSpeed
from moesaic.messages.brownout import BrownoutPolicy

LOW = Thresholds(0.0, 0.0)
POLICY = BrownoutPolicy(mode="auto", slo_ttft_s=0.25, slo_tpot_s=0.15)


def take(speed: StepSpeed, seconds: Iterator[float], count: int, at: Thresholds = EXACT) -> None:
    for _ in range(count):
        speed.took(StepTaken(0.0, next(seconds), 100, 8, at))


def steady(seconds: float, noise: float = 0.0) -> Iterator[float]:
    turn = 1
    while True:
        yield seconds * math.exp(noise * turn)
        turn = -turn


def test_steps_of_a_time_that_is_not_well_known_teach_nothing() -> None:
    early, late = StepSpeed(), StepSpeed()
    take(early, steady(0.02), LEARNS_AFTER // 2)
    take(late, steady(0.02), 2 * LEARNS_AFTER)
    for speed in (early, late):
        take(speed, steady(0.02), 16, LOW)

    assert early.gains == StepSpeed().gains
    assert late.gains.prefill < LEAST_GAIN


def test_steps_count_less_the_more_they_vary() -> None:
    gains = []
    for noise in (0.05, 0.6):
        speed = StepSpeed()
        take(speed, steady(0.02, noise), 4 * LEARNS_AFTER)
        take(speed, steady(0.02, noise), 4, LOW)
        gains.append(speed.gains.prefill)

    calm, noisy = gains
    assert calm < noisy < 1.3


def test_what_brought_nothing_is_tried_again_while_a_target_is_missed() -> None:
    control, now_s, at = PredictiveControl(POLICY, Arrivals()), 0.0, EXACT
    windows = {phase: LatencyWindow(3.0) for phase in ("prefill", "decode")}
    lowered: list[tuple[float, float]] = []
    random = Random(1)

    def serve(until_s: float, waiting: int, gain: float) -> None:
        nonlocal now_s, at
        while now_s < until_s:
            rows, answers = random.randrange(50, 150), random.randrange(1, 9)
            seconds = 0.002 + 1e-4 * rows + 5e-4 * answers
            seconds /= gain ** (1 - at.prefill)
            now_s += seconds
            control.stepped(StepTaken(now_s, seconds, rows, answers, at), 2048)
            state = QueueState(now_s, waiting // 100, waiting, 0.0, 8)
            at = control.decide(state, at, windows).thresholds  # type: ignore[arg-type]  # phases
            if at.prefill < 1:  # most of the time goes into prompts
                lowered.append((now_s, seconds))

    serve(4.0, 0, 1.0)
    assert not lowered
    serve(60.0, 3000, 1.0)  # no threshold helps
    assert 0 < sum(seconds for ended_s, seconds in lowered if ended_s > 8.0) < 5 * TRIAL_S
    serve(200.0, 3000, 1.5)  # now they do
    assert at.prefill < 1
    assert control.speed.gains.prefill > 1.15
