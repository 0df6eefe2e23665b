"""What workers count of the batches they see."""

import threading
from typing import Any

import pytest
import torch

from moesaic.experts.activations import ActivationMeter
from moesaic.messages.activation import ActivationReport, ServedBatches
from moesaic.placement.traffic.recorder import ActivationRecorder, Taken
from tests.placement.drawn import statistics_of

TOPK_IDS = torch.tensor([[0, 1], [0, 2], [3, 1]], dtype=torch.int32)


def report_of(meter: ActivationMeter) -> ActivationReport:
    return meter.report(worker_id="e", generation=1, model_digest="m", epoch=3)


def test_a_report_has_what_came_since_the_last_one_epoch_by_epoch() -> None:
    meter = ActivationMeter(4)
    meter.record(2, 0, TOPK_IDS, 3)
    meter.record(3, 0, TOPK_IDS, 2)
    meter.record(3, 1, TOPK_IDS[:1], 1)
    meter.record(3, 1, TOPK_IDS[:0], 0)  # of no rows

    first = report_of(meter)

    assert first.served == [
        ServedBatches(epoch=2, batches=1, busiest=3),
        ServedBatches(epoch=3, batches=2, busiest=3),
    ]
    assert [layer.batches for layer in first.window.layers] == [2, 1]
    assert first.window.layers[0].tokens == [4, 4, 2, 2]
    assert report_of(meter).window.layers == []


def test_a_batch_that_comes_while_a_report_is_made_is_in_one_window_with_all_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter, began = ActivationMeter(4), threading.Event()
    meter.record(3, 0, TOPK_IDS, 2)
    take = ActivationRecorder.take

    def taken_slowly(recorder: ActivationRecorder, window_s: float) -> Taken:
        taken = take(recorder, window_s)
        began.set()
        # It may come in between, if nothing keeps it from that. Only time shows that something does.
        coming.join(0.2)
        return taken

    def come() -> None:
        began.wait()
        meter.record(3, 0, TOPK_IDS, 2)

    coming = threading.Thread(target=come)
    coming.start()
    monkeypatch.setattr(ActivationRecorder, "take", taken_slowly)
    first = report_of(meter)
    coming.join()
    second = report_of(meter)

    for report in (first, second):
        seen = sum(layer.batches for layer in report.window.layers)
        assert sum(served.batches for served in report.served) == seen == 1


def test_a_report_that_is_asked_for_while_a_batch_is_counted_has_all_of_it_or_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter, began = ActivationMeter(4), threading.Event()
    record, reports = ActivationRecorder.record, []

    def recorded_slowly(recorder: ActivationRecorder, layer: int, topk_ids: Any) -> None:
        record(recorder, layer, topk_ids)
        began.set()
        # A report may come in between, if nothing keeps it from that. Only time shows that something does.
        asking.join(0.2)

    def ask() -> None:
        began.wait()
        reports.append(report_of(meter))

    asking = threading.Thread(target=ask)
    asking.start()
    monkeypatch.setattr(ActivationRecorder, "record", recorded_slowly)
    meter.record(3, 0, TOPK_IDS, 2)
    asking.join()

    (report,) = reports
    assert [layer.batches for layer in report.window.layers] == [1]
    assert report.served == [ServedBatches(epoch=3, batches=1, busiest=2)]


def test_nothing_is_lost_or_counted_twice_while_windows_are_taken() -> None:
    meter, windows = ActivationMeter(8), []
    batch = torch.arange(32, dtype=torch.int32).reshape(16, 2) % 8

    def record() -> None:
        for _ in range(2000):
            meter.record(3, 1, batch, 1)

    threads = [threading.Thread(target=record) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        windows.append(report_of(meter).window)
    windows.append(report_of(meter).window)

    total = statistics_of(windows, 8).traffic([1])[0]
    assert (total.batches, total.rows, total.tokens.sum()) == (4000, 64000, 128000)


def test_a_window_is_as_long_as_the_time_since_the_last_report(monkeypatch) -> None:
    now_s = [10.0]
    monkeypatch.setattr("moesaic.experts.activations.time.monotonic", lambda: now_s[0])
    meter = ActivationMeter(4)

    now_s[0] = 12.5
    first = report_of(meter)
    now_s[0] = 13.0
    second = report_of(meter)

    assert (first.window.window_s, second.window.window_s) == (2.5, 0.5)
