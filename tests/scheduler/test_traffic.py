"""Reports of workers: what cannot be true is counted, and logged once."""

from types import SimpleNamespace
from typing import Any

from structlog.testing import capture_logs

from benchmarks.common.placements import placed_worker
from moesaic.messages.activation import ActivationReport, ActivationWindow
from moesaic.messages.placement import Placement
from moesaic.services.scheduler.planning.traffic import TrafficFeed

PLACED = Placement(
    epoch=3,
    model_digest="m",
    num_experts=2,
    workers=[placed_worker("a")],
    layers=[0],
    slots=[[[0, 1]]],
)


def report(worker_id: str, **changes: Any) -> ActivationReport:
    window = {"generation": 1, "model_digest": "m", "num_experts": 2, "epoch": 3, "window_s": 1.0}
    return ActivationReport(
        window=ActivationWindow(worker_id=worker_id, layers=[], **(window | changes))
    )


def test_a_worker_whose_reports_are_refused_is_told_of_once_until_one_is_taken() -> None:
    nothing: Any = None
    view: Any = SimpleNamespace(current=PLACED)
    feed = TrafficFeed(nothing, nothing, view, half_life_s=60.0)

    with capture_logs() as logs:
        for _ in range(3):
            feed.take(report("b"))
            feed.take(report("a", generation=2))
        for _ in range(2):
            feed.take(report("a", model_digest="another"))
        feed.take(report("a"))
        feed.take(report("a", model_digest="another"))

    assert feed.refused == 9
    told = [(entry["worker_id"], entry["cause"].split(":")[0]) for entry in logs]
    assert told == [
        ("b", "worker_id"),
        ("a", "worker_id"),
        ("a", "model_digest"),
        ("a", "model_digest"),
    ]
