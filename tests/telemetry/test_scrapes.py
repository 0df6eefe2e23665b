"""The listener of metrics before strangers: few connections, no thread for any, and an end of silence."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from prometheus_client import REGISTRY, Gauge

from moesaic.telemetry.metrics import ScrapeLimits, serve_metrics
from tests.waiting import HANG_S

PATIENT = ScrapeLimits(connections=4, seconds=HANG_S)
SHORT = ScrapeLimits(connections=64, seconds=0.2)
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n"


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=HANG_S)


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    received = b""
    try:
        while more := connection.recv(65536):
            received += more
    except ConnectionResetError:
        pass
    return received


@contextmanager
def held(address: str, count: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(address)) for _ in range(count)]
        for connection in connections:
            connection.sendall(says)
        yield connections


@pytest.mark.parametrize("says", [b"", b"GET /metrics HT", b"GET / HTTP/1.1\r\nHost: h\r\n"])
def test_a_scrape_is_answered_while_others_hold_every_place(says: bytes) -> None:
    address = serve_metrics("127.0.0.1", 0, PATIENT)
    threads = set(threading.enumerate())  # those of earlier tests may end meanwhile

    with held(address, 200, says) as silent:
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            assert "python_info" in answer.read().decode()
        assert set(threading.enumerate()) <= threads
        ended = [read_all(connection) for connection in silent[: -PATIENT.connections]]
    assert ended == [b""] * (200 - PATIENT.connections)


@pytest.mark.parametrize("says", [b"", b"\r\n", b"GET /metrics HTTP/1.1\r\nA: b\r\n"])
def test_a_connection_that_does_not_ask_is_ended(says: bytes) -> None:
    address = serve_metrics("127.0.0.1", 0, SHORT)

    with held(address, 20, says) as silent:
        assert [read_all(connection) for connection in silent] == [b""] * 20


def test_a_connection_that_never_stops_asking_is_ended() -> None:
    """Each byte comes in time, and all together do not."""
    address = serve_metrics("127.0.0.1", 0, SHORT)

    with connect(address) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
        slow.settimeout(0.02)
        ended = False
        while not ended:
            try:
                slow.sendall(b"x")
                ended = slow.recv(1) == b""
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                ended = True


def test_a_head_that_is_too_large_is_refused() -> None:
    address = serve_metrics("127.0.0.1", 0, PATIENT)

    with connect(address) as large:
        large.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * PATIENT.head_bytes + b"\r\n\r\n")
        assert read_all(large).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (SCRAPE, b"200"),
        (b"HEAD /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /metrics?name[]=python_info HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /metrics?%ff=%ff HTTP/1.1\r\naccept: %ff;q=;version=\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\ncontent-length: 9999\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2\r\n\r\n", b"400"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET /\xff HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\naccept: \xff\r\n\r\n", b"400"),
    ],
)
def test_what_comes_is_answered_or_refused(asked: bytes, status: bytes) -> None:
    address = serve_metrics("127.0.0.1", 0, PATIENT)

    with connect(address) as connection:
        connection.sendall(asked)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)

    assert answer.split(b" ")[1] == status
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (b"content-length: %d" % len(body) in head) == (not asked.startswith(b"HEAD"))


def test_an_address_of_ipv6_has_brackets() -> None:
    address = serve_metrics("::1", 0, PATIENT)

    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert address.startswith("[::1]:")
        assert answer.status == 200


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4",
        "*/*",
    ],
)
def test_colons_of_names_reach_every_version_of_prometheus(accept: str) -> None:
    address = serve_metrics("127.0.0.1", 0, PATIENT)
    name = "of_test:num_requests"
    gauge = Gauge(name, "With a name such as vLLM's", ["of"])
    gauge.labels("x").set(7)
    try:
        asked = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(asked) as answer:
            assert f'{name}{{of="x"}} 7.0' in answer.read().decode().splitlines()
    finally:
        REGISTRY.unregister(gauge)
