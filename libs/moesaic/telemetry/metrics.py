"""Reading of metrics; each room declares its own, with ``prometheus_client``."""

import functools
import socket
from typing import Any, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from moesaic.addresses import host_port
from moesaic.errors import InUse
from moesaic.telemetry.scrapes import ScrapeLimits, serve_scrapes

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


def series(metric: Metric, *labels: str) -> Metric:
    """Cache ``metric.labels``, which takes several times as long as counting."""
    found: Metric = _series_of(metric, *labels)
    return found


@functools.lru_cache(maxsize=4096)
def _series_of(metric: Any, *labels: str) -> Any:
    return metric.labels(*labels)


def serve_metrics(host: str, port: int, limits: ScrapeLimits | None = None) -> str:
    """Answer ``GET /metrics`` on a thread of its own for as long as the process lives.

    Returns:
        The address, ``host:port``; a free port if ``port`` is 0.

    Raises:
        InUse: the address cannot be listened on.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise InUse(
            "metrics_port",
            f"cannot listen on {host_port(host, port)}: {cause}; "
            "choose another with --metrics-port or --host",
        ) from error
    address = host_port(host, listening.getsockname()[1])
    serve_scrapes(listening, limits or ScrapeLimits())
    return address


def snapshot() -> dict[str, float]:
    """Read every counter and gauge, and the sums and counts of histograms, by name and labels."""
    return {
        _name(sample): sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def _name(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else sample.name
