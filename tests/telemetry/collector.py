"""A collector of traces: a server of OpenTelemetry's own protocol, which keeps what it is sent."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

# As short as it may be, so that tests need not wait for spans.
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
# What a process says of itself.
PROCESS = {"service.name": "test", "service.instance.id": "0"}


@dataclass(frozen=True)
class TakenSpan:
    """A span as it came, with the service that sent it."""

    service: str
    instance: str
    span: Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return {each.key: _value(each.value) for each in self.span.attributes}

    @property
    def times(self) -> tuple[int, int]:
        return self.span.start_time_unix_nano, self.span.end_time_unix_nano


@dataclass
class Collector(TraceServiceServicer):
    """What came so far."""

    address: str = ""
    taken: list[TakenSpan] = field(default_factory=list)

    def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            facts = {each.key: _value(each.value) for each in resource.resource.attributes}
            names = facts["service.name"], facts["service.instance.id"]
            for scope in resource.scope_spans:
                self.taken += [TakenSpan(*names, span) for span in scope.spans]
        return ExportTraceServiceResponse()

    def of(self, trace_id: str) -> list[TakenSpan]:
        """Spans of one trace, the earliest first."""
        found = [each for each in self.taken if each.span.trace_id.hex() == trace_id]
        return sorted(found, key=lambda each: each.times)


@contextmanager
def collecting() -> Iterator[Collector]:
    """Take spans for the length of the block."""
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    collector.address = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def only(taken: list[TakenSpan], name: str) -> TakenSpan:
    """The one span of this name."""
    [found] = [each for each in taken if each.name == name]
    return found


def _value(told: AnyValue) -> Any:
    kind = told.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in told.array_value.values]
    return getattr(told, kind) if kind else None
