"""The spans of this process, if traces are on; else nothing of OpenTelemetry is imported."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from moesaic.errors import InvalidInput

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from moesaic.telemetry.otlp import Attributes, Spans


class _Current:
    """The spans that are sent now."""

    spans: "Spans | None" = None


def current() -> "Spans | None":
    """Find what makes spans here; None: traces are off."""
    return _Current.spans


def within(name: str, attributes: "Attributes") -> "AbstractContextManager[Span | None]":
    """See ``Spans.within``; does nothing where traces are off."""
    return nullcontext() if _Current.spans is None else _Current.spans.within(name, attributes)


@contextmanager
def sent(endpoint: str, share: float | None, described: Mapping[str, str]) -> Iterator[None]:
    """Have spans sent for the length of the block, if there is an ``endpoint``; see ``otlp.exported``.

    ``OTEL_SDK_DISABLED=true`` and ``OTEL_TRACES_EXPORTER=none`` turn traces off, too.

    Raises:
        InvalidInput: the packages are missing, or another protocol than gRPC is asked for.
    """
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not endpoint or off or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        yield
        return
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (protocol := os.environ.get(name) or "grpc") != "grpc":
            raise InvalidInput(
                name, f"must be grpc, got {protocol}; give the collector's port of it"
            )
    try:
        from moesaic.telemetry.otlp import exported
    except ImportError as error:
        fix = f"needs the packages of moesaic[otel]: {error}"
        raise InvalidInput("--otlp-endpoint", fix) from error
    with exported(endpoint, share, described) as _Current.spans:
        try:
            yield
        finally:
            _Current.spans = None
