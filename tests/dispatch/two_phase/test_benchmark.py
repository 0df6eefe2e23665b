"""How ``moesaic bench two-phase`` judges a choice: by blocks side by side, and never by luck."""

import random

import pytest

from benchmarks.two_phase.cells import Paired, judged


def blocks(seconds: dict[str, float], noise: float, seed: int = 0) -> dict[str, list[float]]:
    """Eight of each way, on a machine that is up to three times as slow from one moment to another."""
    rng = random.Random(seed)
    drift = [3 ** rng.random() for _ in range(8)]
    return {
        mode: [at * each * rng.gauss(1.0, noise) for at in drift] for mode, each in seconds.items()
    }


def test_drift_that_is_common_to_both_changes_no_ratio() -> None:
    found = blocks({"a": 1.2, "b": 1.0}, noise=0.0)

    paired = Paired.of(found["a"], found["b"])

    assert paired.rounded() == [1.2, 1.2, 1.2]


@pytest.mark.parametrize(("went", "right"), [("direct", False), ("reduce", False), ("relay", True)])
def test_a_way_that_is_surely_slower_is_wrong(went: str, right: bool) -> None:
    seconds = {"direct": 1.3, "reduce": 1.2, "relay": 1.0, "auto": 1.0}

    cell = judged(blocks(seconds, noise=0.02), went)

    assert cell["went_right"] is right
    assert cell["went_the_fastest"] is right


def test_a_way_that_cannot_be_told_from_the_fastest_is_right_and_not_strictly_so() -> None:
    found = {
        "direct": [1.00, 1.03] * 4,
        "reduce": [2.00, 2.00] * 4,
        "relay": [1.02, 1.00] * 4,
        "auto": [1.00, 1.00] * 4,
    }

    cell = judged(found, "direct")

    assert cell["fastest"] == "relay"
    assert cell["went_right"]
    assert not cell["went_the_fastest"]


def test_noise_is_no_excuse_for_a_way_that_is_much_slower() -> None:
    """So noisy that nothing is sure: the mean decides."""
    found = blocks({"direct": 1.3, "reduce": 1.3, "relay": 1.0, "auto": 1.0}, noise=0.3, seed=1)

    cell = judged(found, "direct")

    assert cell["went_to_fastest"][1] < 1.0 < 1.05 < cell["went_to_fastest"][0]
    assert not cell["went_right"]


def test_one_block_alone_says_nothing_for_sure() -> None:
    assert Paired.of([2.0], [1.0]).least == 0.0
