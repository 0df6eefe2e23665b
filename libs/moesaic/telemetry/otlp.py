"""Spans by OpenTelemetry, sent by OTLP over gRPC. Imported only where traces are on: ``spans``."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
Headers = Mapping[str, str]
LAST_SPANS_S = 2.0  # for a collector to take the spans that are left when a process stops
_w3c = TraceContextTextMapPropagator()


class Spans:
    """Makes the spans of this process. Any thread may call."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(
        self,
        name: str,
        parent: Span | Headers,
        attributes: Attributes,
        *,
        kind: Literal["INTERNAL", "SERVER", "CLIENT"] = "INTERNAL",
        start_ns: int | None = None,
        linked: Iterable[str] = (),
    ) -> Span | None:
        """Begin a span; the caller ends it.

        Args:
            name: its name.
            parent: a span of this process, or the W3C headers of somebody else's; without them a trace begins.
            attributes: what is known at its beginning.
            kind: side of a call.
            start_ns: its beginning since 1970; by default now.
            linked: ``traceparent`` of spans in other traces.

        Returns:
            None: its trace is not in the sample.
        """
        context = (
            _w3c.extract(parent) if isinstance(parent, Mapping) else set_span_in_context(parent)
        )
        contexts = (get_current_span(_w3c.extract({"traceparent": each})) for each in linked)
        span = self._tracer.start_span(
            name,
            context,
            SpanKind[kind],
            attributes,
            [Link(each.get_span_context()) for each in contexts],
            start_ns,
        )
        return span if span.is_recording() else None

    @contextmanager
    def within(self, name: str, attributes: Attributes) -> Iterator[Span]:
        """Make a span of the block, within that of the block around it. It has the error that ends the block."""
        with self._tracer.start_as_current_span(name, attributes=attributes) as span:
            yield span


def traceparent_of(span: Span) -> str:
    """Name a span in the form of the W3C's header; empty: it is not recorded."""
    carrier: dict[str, str] = {}
    if span.is_recording():
        _w3c.inject(carrier, set_span_in_context(span))
    return carrier.get("traceparent", "")


def trace_id_of(span: Span) -> str:
    """Give the id of a span's trace, 32 hexadecimal digits."""
    return format_trace_id(span.get_span_context().trace_id)


def mark_failed(span: Span, code: str) -> None:
    """Mark a span whose work has failed with an error of a class."""
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR)


@contextmanager
def exported(endpoint: str, share: float | None, described: Mapping[str, str]) -> Iterator[Spans]:
    """Send spans for the length of the block, on a thread of their own.

    A collector that cannot be reached costs spans, and ``LAST_SPANS_S`` at the end, but nothing else.

    Args:
        endpoint: address of the collector.
        share: of traces that begin here; None: as ``OTEL_TRACES_SAMPLER`` says, by default all.
        described: what the process is, by the names of OpenTelemetry.
    """
    # Its name in variables is the operator's, and goes before ours.
    own = {name: value for name, value in described.items() if not _is_given(name)}
    exporter = OTLPSpanExporter(endpoint)
    provider = TracerProvider(
        None if share is None else ParentBasedTraceIdRatio(share),
        Resource.create(own),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield Spans(provider.get_tracer("moesaic"))
    finally:
        # It would try again for as long as an export may take.
        last = threading.Timer(LAST_SPANS_S, exporter.shutdown)
        last.daemon = True
        last.start()
        provider.shutdown()
        last.cancel()


def _is_given(name: str) -> bool:
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",")
    by_name = name == "service.name" and bool(os.environ.get("OTEL_SERVICE_NAME"))
    return by_name or any(each.partition("=")[0].strip() == name for each in given)
