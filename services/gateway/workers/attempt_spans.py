"""The two spans of one attempt of a run: until it has a worker, and until the worker has ended it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from moesaic.errors import MoesaicError
from moesaic.services.gateway.workers.run import Event, Key
from moesaic.telemetry import spans
from moesaic.v1.attention_pb2 import Failure, Finished, Submit

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from moesaic.telemetry.otlp import Attributes


class AttemptSpans:
    """The spans of one attempt."""

    def __init__(self, parent: "Span", submit: Submit) -> None:
        """Begin to route; ``submit`` will name the span that waits for its worker."""
        self._parent, self._submit = parent, submit
        self._open = self._begin("route")

    def routed(self, key: Key, why: "Attributes") -> None:
        """Note that a worker is about to get the attempt, and why that one."""
        from moesaic.telemetry.otlp import traceparent_of

        if self._open is not None:
            self._open.set_attributes({"moesaic.worker_id": key[0], **why})
            self._open.end()
        self._open = self._begin("execute", key)
        if self._open is not None:
            self._submit.traceparent = traceparent_of(self._open)

    def watching(self, deliver: Callable[[Event], None]) -> Callable[[Event], None]:
        """Wrap what takes the events of the attempt: the last one ends the spans."""

        def watched(event: Event) -> None:
            if isinstance(event, Finished):
                self.end()
            elif isinstance(event, Failure | MoesaicError):
                self.end(event.code)
            deliver(event)

        return watched

    def end(self, code: str = "", *, cancelled: bool = False) -> None:
        """End what has not ended; ``code``: of the error, if it is one."""
        from moesaic.telemetry.otlp import mark_failed

        span, self._open = self._open, None
        if span is not None:
            if code:
                mark_failed(span, code)
            if cancelled:
                span.set_attribute("moesaic.outcome", "cancelled")
            span.end()

    def _begin(self, name: str, key: Key | None = None) -> "Span | None":
        made = spans.current()
        if made is None:
            return None
        attributes: dict[str, str | int] = {
            "moesaic.run_id": self._submit.request_id,
            "moesaic.attempt": self._submit.attempt,
        }
        if key is not None:
            attributes["moesaic.worker_id"] = key[0]
        return made.begin(
            name, self._parent, attributes, kind="INTERNAL" if key is None else "CLIENT"
        )
