"""Differences are found under drift that is common to all ways, and are not made up where there are none."""

import random

import pytest

from moesaic.dispatch.exchange.costs import CASES, Case
from moesaic.dispatch.exchange.evidence import KEPT, Evidence
from moesaic.dispatch.exchange.trials import Slot


def sweep(evidence: Evidence, number: int, seconds: dict[Case, list[float]]) -> None:
    for case, found in seconds.items():
        for each in found:
            evidence.add(Slot((0.0, number), case, 0.0, settled=True), each)


def observed(truth: dict[Case, float], sweeps: int, noise: float, seed: int) -> Evidence:
    """Every sweep on a machine that is up to ten times slower than in another."""
    rng, evidence = random.Random(seed), Evidence()
    for number in range(sweeps):
        drift = 10 ** rng.random()
        found = {
            case: [drift * seconds * rng.gauss(1.0, noise) for _ in range(4)]
            for case, seconds in truth.items()
        }
        sweep(evidence, number, found)
    evidence.finish()
    return evidence


@pytest.mark.parametrize("fastest", CASES)
@pytest.mark.parametrize("first", CASES)
def test_what_is_clearly_faster_is_found_whatever_the_machine_does(
    first: Case, fastest: Case
) -> None:
    truth: dict[Case, float] = dict.fromkeys(CASES, 1.3e-3)
    truth[fastest] = 1.0e-3

    for seed in range(20):
        evidence = observed(truth, 4, 0.05, seed)
        assert evidence.best(first, CASES) == fastest
        assert evidence.is_settled(fastest, CASES)


def test_what_is_alike_is_seldom_told_apart() -> None:
    truth: dict[Case, float] = dict.fromkeys(CASES, 1e-3)

    left = [observed(truth, 4, 0.1, seed).best("case-1", CASES) != "case-1" for seed in range(200)]

    assert sum(left) <= 20  # two comparisons, each wrong to one side in 2.5 %


def test_little_is_believed_of_nothing() -> None:
    evidence = observed({"direct": 1.0, "case-2": 1e-3}, 2, 0.0, 0)

    assert evidence.best("direct", CASES) == "direct"
    assert not evidence.is_settled("direct", ["direct", "case-2"])


def test_enough_is_enough() -> None:
    evidence = observed({"direct": 1.0, "case-2": 1.0}, KEPT, 0.5, 1)

    assert evidence.is_settled("direct", ["direct", "case-2"])


def test_a_single_exchange_of_a_slot_does_not_count() -> None:
    evidence = Evidence()
    for number in range(KEPT):
        sweep(evidence, number, {"direct": [1.0, 1.0], "case-2": [1e-3]})
    evidence.finish()

    assert evidence.ratio("case-2", "direct") is None


def test_sweeps_of_long_ago_are_forgotten() -> None:
    evidence = Evidence()
    for number in range(KEPT):
        sweep(evidence, number, {"direct": [1.0, 1.0], "case-2": [2.0, 2.0]})
    for number in range(KEPT):
        sweep(evidence, KEPT + number, {"direct": [2.0, 2.0], "case-2": [1.0, 1.0]})
    evidence.finish()

    assert evidence.best("direct", CASES) == "case-2"
