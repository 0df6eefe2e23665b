import urllib.request

import pytest
from prometheus_client import REGISTRY, Counter, Histogram

from moesaic.errors import InvalidInput
from moesaic.telemetry.metrics import counter, serve_metrics, snapshot

_seen = Counter("moesaic_test_seen", "for this test", ["kind"])
_took = Histogram("moesaic_test_took_seconds", "for this test")


def test_metrics_can_be_scraped_and_a_taken_port_is_named():
    address = serve_metrics("127.0.0.1", 0)
    _seen.labels("scraped").inc()

    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert 'moesaic_test_seen_total{kind="scraped"} 1.0' in answer.read().decode()
    with pytest.raises(InvalidInput, match=r"metrics_port: .*--metrics-port"):
        serve_metrics("127.0.0.1", int(address.rsplit(":", 1)[1]))


def test_a_snapshot_has_counters_by_label_and_no_buckets():
    _seen.labels("snapshot").inc(2)
    _took.observe(0.5)

    values = snapshot()

    assert values['moesaic_test_seen_total{kind="snapshot"}'] == 2
    assert values["moesaic_test_took_seconds_sum"] == 0.5
    assert not [name for name in values if "_bucket" in name or "_created" in name]


def test_a_counter_shows_all_values_of_its_label_before_a_first_event() -> None:
    made = counter("of_test_outcomes", "Of this test", "outcome", "ok", "failed")
    try:
        assert snapshot()['of_test_outcomes_total{outcome="failed"}'] == 0
        assert snapshot()['of_test_outcomes_total{outcome="ok"}'] == 0
    finally:
        REGISTRY.unregister(made)
