"""Metrics: series that are looked up once, values read, and the listener for scrapes.

Each room declares its own metrics, with ``prometheus_client``. The listener has one thread, few connections, and a time
limit for each. Any path answers with the metrics. Silent connections make room for newer ones, so a scrape finds a
place while strangers hold all of them.
"""

import asyncio
import functools
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, make_asgi_app
from prometheus_client.samples import Sample

from moesaic.addresses import host_port
from moesaic.errors import InUse

_END_OF_HEAD = b"\r\n\r\n"
_metrics = make_asgi_app()
Metric = TypeVar("Metric", Counter, Gauge, Histogram)


@dataclass(frozen=True)
class ScrapeLimits:
    """Bounds of the listener.

    Attributes:
        connections: open at a time.
        seconds: from the beginning of a connection to the end of its answer.
        head_bytes: of a request, up to its empty line.
    """

    connections: int = 32
    seconds: float = 5.0
    head_bytes: int = 8192


def serve_scrapes(listening: socket.socket, limits: ScrapeLimits) -> None:
    """Answer on a socket that listens, on a thread of its own, for as long as the process lives."""
    serving = _Listener(limits).serve(listening)
    threading.Thread(target=asyncio.run, args=(serving,), name="metrics", daemon=True).start()


class _Listener:
    def __init__(self, limits: ScrapeLimits) -> None:
        self._limits = limits
        # The first one has been silent for longest; those that have asked stand last.
        self._open: dict[asyncio.StreamWriter, None] = {}

    async def serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(
            self._connected, sock=listening, limit=self._limits.head_bytes
        )
        await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._limits.connections:
            self._end(next(iter(self._open)))
        self._open[writer] = None
        try:
            async with asyncio.timeout(self._limits.seconds):
                await self._converse(reader, writer)
        except (TimeoutError, EOFError, OSError):
            # It was silent or slow, or has gone.
            return
        finally:
            self._end(writer)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(_END_OF_HEAD)
        except asyncio.LimitOverrunError:
            writer.write(_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
        else:
            # Nobody has ended it meanwhile.
            if writer in self._open:
                self._open[writer] = self._open.pop(writer)
            writer.write(await _answer(head))
        writer.close()
        # Once all is sent.
        await writer.wait_closed()

    def _end(self, writer: asyncio.StreamWriter) -> None:
        self._open.pop(writer, None)
        writer.transport.abort()


async def _answer(head: bytes) -> bytes:
    """Answer one request, whose head is whole."""
    line, *lines = head.removesuffix(_END_OF_HEAD).split(b"\r\n")
    words = line.split(b" ")
    if not head.isascii() or len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _response(HTTPStatus.BAD_REQUEST)
    if words[0] not in (b"GET", b"HEAD"):
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, {b"allow": b"GET, HEAD"})
    fields = (line.partition(b":") for line in lines)
    headers = [(name.lower(), value.strip()) for name, _, value in fields]
    try:
        status, found, body = await _scraped(words[1].partition(b"?")[2], headers)
    except ValueError:  # of the query, or of a header
        return _response(HTTPStatus.BAD_REQUEST)
    return _response(status, found, body, only_head=words[0] == b"HEAD")


async def _scraped(
    query: bytes, headers: list[tuple[bytes, bytes]]
) -> tuple[HTTPStatus, dict[bytes, bytes], bytes]:
    """Have the client library answer, which knows the formats and the filters of scrapes."""
    sent: list[Any] = []
    # Without this, Prometheus gets OpenMetrics, where the library writes the colons of vLLM's names as underscores.
    others = [header for header in headers if header[0] != b"accept"]

    async def receive() -> dict[str, str]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    await _metrics({"type": "http", "query_string": query, "headers": others}, receive, send)
    start, body = sent
    return HTTPStatus(start["status"]), dict(start["headers"]), body["body"]


def _response(
    status: HTTPStatus,
    headers: Mapping[bytes, bytes] | None = None,
    body: bytes = b"",
    *,
    only_head: bool = False,
) -> bytes:
    ours = {b"content-length": b"%d" % len(body), b"connection": b"close"}
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    lines += [name + b": " + value for name, value in {**(headers or {}), **ours}.items()]
    return b"\r\n".join(lines) + _END_OF_HEAD + (b"" if only_head else body)


def counter(name: str, text: str, label: str, *values: str) -> Counter:
    """Make a counter that shows all values of its label from the start, so that a first event is an increase."""
    made = Counter(name, text, [label])
    for value in values:
        made.labels(value)
    return made


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
