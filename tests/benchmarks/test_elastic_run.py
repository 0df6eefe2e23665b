"""Figures of the real run: flapping and paid time are counted as they are defined."""

import pytest

from benchmarks.elastic.operator import ElasticSample
from benchmarks.elastic.real_figures import flaps, worker_seconds
from moesaic.v1 import scheduler_pb2 as pb


def action(
    at: float, before: tuple[int, int], wanted: tuple[int, int], cause: str = "cost"
) -> object:
    shapes = [pb.FleetShape(attention=a, experts=e) for a, e in (before, wanted)]
    return pb.ScalingDecision(at=at, before=shapes[0], wanted=shapes[1], cause=cause, adopted=True)


@pytest.mark.parametrize(
    ("later", "count"),
    [
        (action(15.0, (1, 2), (1, 1)), 1),  # taken back at once, to save money
        (action(25.0, (1, 2), (1, 1)), 0),  # after two cool-downs
        (action(15.0, (1, 2), (2, 2), "slo"), 0),  # not taken back
    ],
)
def test_an_action_that_is_taken_back_soon_is_a_flap(later: object, count: int) -> None:
    first = action(0.0, (1, 1), (1, 2), "slo")

    assert flaps([first, later], cool_down_s=10.0) == count  # type: ignore[list-item]  # protos


def test_workers_that_a_missed_target_brings_back_are_no_flap() -> None:
    removed, back = action(0.0, (1, 2), (1, 1)), action(5.0, (1, 1), (1, 2), "slo")

    assert flaps([removed, back], cool_down_s=10.0) == 0  # type: ignore[list-item]  # protos


def test_workers_are_paid_for_while_requests_arrive() -> None:
    samples = [
        ElasticSample(at, 1, experts, 1.0, 1.0, 0) for at, experts in ((0, 1), (10, 2), (20, 2))
    ]

    assert worker_seconds(samples, end_s=25.0) == pytest.approx(10 * 2 + 15 * 3)
