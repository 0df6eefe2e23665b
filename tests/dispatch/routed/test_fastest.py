"""The fastest way to compute a step is found, and found again, at the cost of few slow steps."""

import itertools
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from moesaic.dispatch.routed.fastest import RETRY_EVERY, TRIALS, FastestWay


@dataclass(frozen=True)
class Way:
    parts: int
    threads: int
    awake: bool


WAYS = [Way(*each) for each in itertools.product((1, 2, 4), (2, 1), (False, True))]


def took_s(way: Way, factors: tuple[float, float, float]) -> float:
    """Seconds of a step: fields add to it on their own."""
    parts, threads, awake = factors
    return 1.0 + parts * (way.parts - 1) + threads * (way.threads - 1) + awake * way.awake


def run(fastest: FastestWay[Way], rows: int, steps: int, factors: tuple[float, ...]) -> list[Way]:
    taken = []
    for _ in range(steps):
        way = fastest.choose(rows)
        fastest.took(way, rows, took_s(way, (factors[0], factors[1], factors[2])))
        taken.append(way)
    return taken


@given(st.tuples(*[st.sampled_from([-0.1, -0.02, 0.02, 0.1, 0.9])] * 3), st.integers(1, 4096))
def test_the_fastest_of_all_is_found_and_kept(
    factors: tuple[float, float, float], rows: int
) -> None:
    fastest = FastestWay(WAYS)
    best = min(WAYS, key=lambda way: took_s(way, factors))

    run(fastest, rows, TRIALS * len(WAYS), factors)
    taken = Counter(run(fastest, rows, 10 * RETRY_EVERY, factors))

    assert taken[best] >= 10 * (RETRY_EVERY - 1)


def test_a_slow_way_is_tried_once_and_those_beyond_it_never() -> None:
    fastest = FastestWay(WAYS)

    taken = Counter(run(fastest, 1024, RETRY_EVERY - 1, (0.5, -0.5, 0.01)))

    assert taken[Way(1, 2, False)] > RETRY_EVERY / 2
    assert taken[Way(1, 1, False)] == taken[Way(2, 2, False)] == 1
    assert not taken[Way(4, 1, False)]


def test_it_follows_when_another_way_becomes_the_fastest() -> None:
    fastest = FastestWay(WAYS)
    run(fastest, 64, 100, (0.5, 0.5, 0.5))

    later = run(fastest, 64, 60 * RETRY_EVERY, (-0.1, -0.4, -0.05))

    assert later[-1] == Way(4, 2, True)


def test_a_single_disturbed_step_changes_nothing() -> None:
    fastest = FastestWay(WAYS)
    run(fastest, 8, 100, (0.1, 0.1, 0.1))
    best = fastest.choose(8)

    fastest.took(best, 8, 100.0)

    assert Counter(fastest.choose(8) for _ in range(RETRY_EVERY - 1)).most_common(1)[0][0] == best


def test_a_new_size_begins_with_the_fastest_of_the_nearest() -> None:
    fastest = FastestWay(WAYS)
    run(fastest, 1000, 100, (-0.1, 0.5, -0.1))
    run(fastest, 1, 100, (0.5, 0.5, 0.5))

    assert fastest.choose(300) == Way(4, 1, True)
    assert fastest.choose(2) == Way(1, 1, False)


def test_steps_around_a_power_of_two_are_one_size() -> None:
    fastest = FastestWay(WAYS)
    run(fastest, 1024, 60, (0.1, 0.1, 0.1))

    assert fastest.choose(1001) == fastest.choose(1040) == Way(1, 1, False)


def test_one_way_needs_no_trial() -> None:
    fastest = FastestWay(WAYS[:1])

    assert run(fastest, 5, 100, (0, 0, 0)) == WAYS[:1] * 100
