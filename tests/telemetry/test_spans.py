"""Spans go to a collector if operators ask for it, and cost nothing else."""

import subprocess
import sys

import pytest

from moesaic.errors import InvalidInput
from moesaic.services.scheduler.settings import SchedulerSettings
from moesaic.telemetry import spans
from moesaic.usage.reading import load_settings
from tests.telemetry.collector import PROCESS, Collector

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = CALLER.split("-")[1]


@pytest.mark.parametrize("service", ["gateway", "attention", "expert", "scheduler"])
def test_without_traces_no_service_imports_opentelemetry(service: str) -> None:
    # The client of Redis imports parts for metrics of its own, wherever they are installed.
    told = (
        f"import sys, moesaic.services.{service}.main; "
        "ours = 'opentelemetry.sdk.trace', 'opentelemetry.exporter'; "
        "print([name for name in sys.modules if name.startswith(ours)])"
    )

    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_a_callers_decision_to_sample_comes_before_the_share(collector: Collector) -> None:
    with spans.sent(collector.address, 0.0, PROCESS):
        made = spans.current()
        assert made is not None
        inside = made.begin("inside", {"traceparent": CALLER}, {})
        assert inside is not None
        inside.end()
        assert made.begin("fresh", {}, {}) is None
    with spans.sent(collector.address, 1.0, PROCESS):
        made = spans.current()
        assert made is not None
        assert made.begin("left out", {"traceparent": CALLER[:-1] + "0"}, {}) is None

    assert [(each.name, each.span.trace_id.hex()) for each in collector.taken] == [
        ("inside", TRACE)
    ]


@pytest.mark.parametrize("header", ["", "no context", f"00-{'0' * 32}-b7ad6b7169203331-01"])
def test_headers_that_name_no_trace_begin_one(collector: Collector, header: str) -> None:
    with spans.sent(collector.address, 1.0, PROCESS):
        made = spans.current()
        assert made is not None
        span = made.begin("fresh", {"traceparent": header}, {})
        assert span is not None
        span.end()
    [taken] = collector.taken

    assert taken.span.parent_span_id == b""
    assert any(taken.span.trace_id)


def test_blocks_within_each_other_are_spans_within_each_other(collector: Collector) -> None:
    with (
        spans.sent(collector.address, 1.0, PROCESS),
        pytest.raises(ZeroDivisionError),
        spans.within("outer", {}),
        spans.within("inner", {"n": 1}),
    ):
        raise ZeroDivisionError
    inner, outer = sorted(collector.taken, key=lambda each: each.name)

    assert inner.span.parent_span_id == outer.span.span_id
    assert outer.times[0] <= inner.times[0] <= inner.times[1] <= outer.times[1]
    assert inner.span.status.code == inner.span.status.STATUS_CODE_ERROR


def test_without_a_collector_blocks_have_no_spans() -> None:
    with spans.sent("", 1.0, PROCESS), spans.within("outer", {}) as span:
        assert spans.current() is None
        assert span is None


def test_a_collector_that_does_not_answer_keeps_nobody_from_stopping() -> None:
    with spans.sent("http://127.0.0.1:1", 1.0, PROCESS):
        made = spans.current()
        assert made is not None
        for _ in range(5000):  # more than are kept
            span = made.begin("lost", {}, {})
            assert span is not None
            span.end()

    assert spans.current() is None


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")]
)
def test_the_variables_that_turn_opentelemetry_off_turn_traces_off(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)

    with spans.sent(collector.address, 1.0, PROCESS):
        assert spans.current() is None


def test_another_protocol_than_grpc_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")

    sending = spans.sent("http://127.0.0.1:4318", 1.0, PROCESS)
    with pytest.raises(InvalidInput, match=r"OTEL_EXPORTER_OTLP_PROTOCOL: must be grpc"):
        sending.__enter__()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "moesaic.telemetry.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)

    sending = spans.sent("http://127.0.0.1:4317", 1.0, PROCESS)
    with pytest.raises(InvalidInput, match=r"--otlp-endpoint.* moesaic\[otel\]"):
        sending.__enter__()


def test_a_name_that_the_operator_gives_the_process_comes_first(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=7,zone=a")

    with spans.sent(collector.address, 1.0, PROCESS), spans.within("block", {}):
        pass
    [taken] = collector.taken

    assert (taken.service, taken.instance) == ("theirs", "7")


def test_the_standard_variable_names_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    by_variable = load_settings(SchedulerSettings, [])
    by_flag = load_settings(SchedulerSettings, ["--otlp-endpoint", "other:4317"])

    assert by_variable.otlp_endpoint == "http://collector:4317"
    assert by_flag.otlp_endpoint == "other:4317"


@pytest.mark.parametrize("endpoint", ["collector", "http://collector", "ftp://a:1", "a b:1"])
def test_an_endpoint_without_a_port_or_of_another_kind_is_refused(
    endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(SchedulerSettings, ["--otlp-endpoint", endpoint])

    assert "--otlp-endpoint" in capsys.readouterr().err
