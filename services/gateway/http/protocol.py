"""HTTP/1.1: httptools' parser, bounds of all but the body, and checks of heads by RFC 9110 and 9112."""

import asyncio
import re
import sys
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from moesaic.open_files import connections_within
from moesaic.services.gateway.http.problems import HttpProblem, problem

Header = tuple[bytes, bytes]  # the name in lower case, the value

VERSIONS = ("1.0", "1.1")
MAX_TARGET_BYTES = 32 << 10
_AUTHORITY = re.compile(rb"(?:\[[\w:.%~-]+\]|[\w.~!$&'()*+,;=%-]+)(?::\d*)?", re.ASCII)
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*).*", re.IGNORECASE | re.DOTALL)
# Of a request's first line and headers, beside other bytes of the same packet.
MAX_HEAD_BYTES = 64 << 10
HEAD_S = 30.0  # for them to arrive
# Of a body that comes in chunks, so many bytes for each byte of what frames them: every chunk costs a call of the
# parser, however small it is. Beside that they have as much as a head, for trailers and the chunks of small bodies.
BODY_PER_FRAMING = 8
PACKET_BYTES = 16 << 10  # that are parsed between two looks at what they were
MAX_PIPELINED = 32  # requests that wait for the answer to one before them
# A refused request may be answered before all of it has arrived. The rest is read up to these limits, since a client
# can lose the answer if the connection is closed with unread bytes. They are large enough for uploads of files.
DRAIN_BYTES = 201 << 20
DRAIN_S = 10.0
REFUSED_BYTES = 1 << 20  # the same after bytes that cannot be parsed, or have no clear end
MAX_CONNECTIONS = 1 << 16  # of a listener
UNSENT_BYTES = (64 << 10, 16 << 10)  # from which on writers wait, and down to which


def fault_of(
    method: bytes, target: bytes, version: str, headers: Sequence[Header]
) -> HttpProblem | None:
    """Find the fault of a head that the parser accepts; None: it is valid."""
    if version == "0.9":
        return _invalid("the request line has no supported version of HTTP: use HTTP/1.1")
    if version not in VERSIONS:
        what = f"HTTP/{version} is not supported: use HTTP/1.1"
        return problem(505, "http_version_not_supported", what)
    if method == b"CONNECT":
        return problem(501, "not_implemented", "tunnels (CONNECT) are not supported")
    return (
        fault_of_length(target)
        or _fault_of_host(version, target, headers)
        or _fault_of_codings(version, headers)
    )


def fault_of_length(target: bytes) -> HttpProblem | None:
    """Refuse a target that is too long, also before all of it has arrived."""
    if len(target) <= MAX_TARGET_BYTES:
        return None
    what = f"the target of the request must be at most {MAX_TARGET_BYTES} bytes"
    return problem(414, "request_too_large", what)


def split_target(target: bytes) -> tuple[bytes | None, bytes]:
    """Split an absolute target into its host and the path with its query; other targets have no host."""
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        return None, target
    authority, path = found.groups()
    return authority, path if path.startswith(b"/") else b"/" + path


def _fault_of_host(version: str, target: bytes, headers: Sequence[Header]) -> HttpProblem | None:
    hosts = [value for name, value in headers if name == b"host"]
    named, path = split_target(target)
    if len(hosts) > 1:
        return _invalid(f"the request has {len(hosts)} host headers: send one")
    if not hosts and version != "1.0":
        return _invalid("the host header is missing")
    if not all(_AUTHORITY.fullmatch(host) for host in hosts):
        return _invalid("the host header must be a host, with or without a port")
    if named is not None and not _AUTHORITY.fullmatch(named):
        return _invalid("the target of the request names no host")
    if not path.startswith(b"/"):
        return _invalid("the target of the request must be a path, or a URL with http or https")
    return None


def _fault_of_codings(version: str, headers: Sequence[Header]) -> HttpProblem | None:
    """Refuse bodies whose end is ambiguous."""
    told = [value for name, value in headers if name == b"transfer-encoding"]
    if not told:
        return None
    if version == "1.0":
        return _invalid("HTTP/1.0 has no transfer-encoding: send a content-length")
    if any(name == b"content-length" for name, _ in headers):
        return _invalid("content-length and transfer-encoding contradict each other: send one")
    codings = [coding.strip(b" \t").lower() for coding in b",".join(told).split(b",")]
    if codings[-1] != b"chunked" or codings.count(b"chunked") > 1:
        return _invalid("the transfer-encoding must end with chunked, once")
    if len(codings) > 1:
        what = "the only supported transfer-encoding is chunked: remove the others"
        return problem(501, "not_implemented", what)
    return None


def _invalid(message: str) -> HttpProblem:
    return problem(400, "invalid_request", message)


class Beginning(Protocol):
    """A connection that is not open yet."""

    def abort(self) -> None:
        """Hang up."""
        ...


class Connections(ServerState):
    """The connections of one server.

    Attributes:
        most: that are open at a time.
        silent: those of which no whole request has come, or none since the last answer; longest first.
        beginning: those that are not open yet, as their handshakes have not ended; longest first.
    """

    def __init__(self, share: float) -> None:
        """Bound them by a share of the files that this process may open."""
        super().__init__()
        self.most = connections_within(share, MAX_CONNECTIONS)
        self.silent: dict[BoundedHttp, None] = {}
        self.beginning: dict[Beginning, None] = {}

    def begin(self, connection: Beginning) -> None:
        """Count a connection whose handshake begins."""
        self.beginning[connection] = None
        self.make_room()

    def end(self, connection: Beginning) -> None:
        """Count it no more: it is open, or closed."""
        self.beginning.pop(connection, None)

    def make_room(self) -> None:
        """Hang up on whoever has been silent for longest, if there are too many."""
        if len(self.connections) + len(self.beginning) > self.most:
            for first in self.beginning:
                first.abort()
                return
            for oldest in self.silent:
                oldest.transport.abort()
                oldest.forget()
                return


class Cycle(RequestResponseCycle):
    """One request and its answer. HTTP/1.0 has no chunks: a body of unknown length ends with the connection."""

    _ends_unchunked = False

    async def send(self, message: Any) -> None:
        """Send a part of the answer."""
        if message["type"] != "http.response.start":
            if self._ends_unchunked:
                self.expected_content_length = len(message.get("body", b""))
            return await super().send(message)
        names = [name.lower() for name, _ in message.get("headers", ())]
        if self.scope["http_version"] == "1.0" and b"content-length" not in names:
            self._ends_unchunked, self.chunked_encoding = True, False
        await super().send(message)
        # None: the client has disconnected.
        protocol = self.transport.get_protocol()
        if not self.keep_alive and isinstance(protocol, BoundedHttp):
            # uvicorn would close the connection while the request is still being read.
            self.keep_alive, self.on_response = True, protocol.hang_up


class BoundedHttp(HttpToolsProtocol):
    """One connection. An invalid, too long or too slow message ends it, with an error as the answer.

    The parser itself would collect a header without an end, or a trailer behind a chunked body, for ever.
    """

    # Attributes beyond 30 in an object's dictionary would cost more than 1 KB of each connection.
    __slots__ = (
        "_begun",
        "_body_bytes",
        "_drain_bytes",
        "_fault",
        "_hung_up",
        "_in_head",
        "_in_message",
        "_num_messages",
        "_other_bytes",
        "_packet",
        "_refusal",
        "_too_late",
    )

    # Blank lines may come before the first request.
    url = b""
    server_state: Connections

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take what uvicorn's protocol takes."""
        super().__init__(*args, **options)
        # What is being parsed.
        self._packet = b""
        self._in_head, self._in_message = True, False
        self._num_messages = 0
        self._body_bytes = 0  # of the message that comes now
        self._other_bytes = 0  # of it, which are its head, or frame its body
        self._drain_bytes = 0  # that may still come of a message that was answered
        self._too_late: asyncio.TimerHandle | None = None
        self._fault: HttpProblem | None = None  # of the head that came last
        self._refusal: HttpProblem | None = None  # ends the connection; later bytes are not parsed
        self._hung_up = False  # the last answer was sent; later bytes are not parsed
        self._begun: RequestResponseCycle | None = None  # of the answer in progress

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrower, as uvicorn has it
        """Wait for a request: a client that connects has something to ask."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(*UNSENT_BYTES)
        self.server_state.silent[self] = None
        self.server_state.make_room()
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more: the client has gone, or was let go."""
        self._end_wait()
        self.forget()
        self.pipeline.clear()
        if self._begun is not None and not self._begun.response_complete:
            # uvicorn notifies only the newest request, which may be waiting behind this one.
            self._begun.disconnected = True
            self._begun.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._begun = cycle
        super()._start_asgi_task(cycle, app)

    def forget(self) -> None:
        """Count it no more: it is closed."""
        self.server_state.silent.pop(self, None)
        self.server_state.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of one request, or of several."""
        for start in range(0, len(data), PACKET_BYTES):
            if self.transport.is_closing():
                return
            if self._refusal is not None or self._hung_up:
                return self._drain(len(data) - start)
            self._feed(data[start : start + PACKET_BYTES])
        idle = self.cycle is not None and self.cycle.response_complete and not self._in_message
        # What came was nothing.
        if idle and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _feed(self, data: bytes) -> None:
        before, in_message, body_bytes = self._num_messages, self._in_message, self._body_bytes
        self._packet = data
        super().data_received(data)
        self._packet = b""
        if self._refusal is not None or self._hung_up or self.transport.is_closing():
            return
        if in_message and before != self._num_messages:
            # A packet of two messages is counted to neither.
            return
        if before != self._num_messages:
            body_bytes = 0
        self._other_bytes += len(data) - (self._body_bytes - body_bytes)
        most = MAX_HEAD_BYTES
        if not self._in_head:
            most += self._body_bytes // BODY_PER_FRAMING
        if self._other_bytes > most:
            what = "headers" if self._in_head else "trailers, and what frames chunks of the body,"
            message = f"the {what} must be at most {most} bytes"
            too_long = fault_of_length(self.url) if self._in_head else None
            self._refuse(too_long or problem(431, "request_too_large", message))
        elif self._is_answered and self._in_message:
            self._drain(len(data))

    def _drain(self, num_bytes: int) -> None:
        """Discard bytes of an answered request, up to a limit."""
        self._drain_bytes -= num_bytes
        if self._drain_bytes < 0:
            self.transport.close()

    def on_message_begin(self) -> None:
        """Note the first byte of a request."""
        self._num_messages += 1
        self._in_message = True
        if not self._in_head:
            self._begin_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are nobody's."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Note that the head is whole: its request may be answered."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self._fault = fault_of(method, self.url, version, self.headers)
        if self._fault is not None:
            # The parser then calls send_400_response.
            raise ValueError("a head that is refused")
        if self.parser.should_upgrade():
            return
        host, self.url = split_target(self.url)
        # The host of the target overrides the header (RFC 9112, section 3.2.2).
        if host is not None:
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", host))
        super().on_headers_complete()
        self._in_head, self._other_bytes = False, 0
        self._end_wait()
        # uvicorn creates the cycles itself, and has no setting for their class.
        self.cycle.__class__ = Cycle
        if version == "1.0":
            self.cycle.waiting_for_100_continue = False
        if len(self.pipeline) > MAX_PIPELINED:
            what = f"at most {MAX_PIPELINED} requests may wait on one connection"
            self._fault = problem(400, "invalid_request", what)
            raise ValueError("too many requests")

    def on_body(self, body: bytes) -> None:
        """Count bytes of the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the whole request is here."""
        if self.parser.should_upgrade():
            return
        self._in_message = False
        self.server_state.silent.pop(self, None)
        if self._is_answered:
            self._end_wait()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note that the transport has the whole answer."""
        is_last = not self.pipeline
        super().on_response_complete()
        if self._refusal is not None:
            if is_last:
                self._end_with(self._refusal)
            return
        if self._is_answered and not self.transport.is_closing():
            self.server_state.silent[self] = None
        if self._is_answered and self._in_message and not self.transport.is_closing():
            self._drain_bytes = DRAIN_BYTES
            self._end_wait()
            self._too_late = self.loop.call_later(DRAIN_S, self.transport.close)

    @property
    def _is_answered(self) -> bool:
        """True if the request that came last has been answered, whole or not."""
        return self.cycle is not None and self.cycle.response_complete and not self._in_head

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, and refused heads, in the form of every other error."""
        invalid = problem(400, "invalid_request", "the request is not valid HTTP/1.1")
        bounded = self._fault is not None and self._in_head
        self._refuse(self._fault or invalid, DRAIN_BYTES if bounded else REFUSED_BYTES)

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore an offer of another protocol. The parser stops there, so a new one reads the request again."""
        # uvicorn calls this while it handles that exception.
        found = sys.exception()
        assert isinstance(found, httptools.HttpParserUpgrade)
        [at] = found.args
        first = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        # As uvicorn does
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        head = b"%b %b HTTP/%b\r\n" % first + b"".join(lines) + b"\r\n"
        self._packet = head + self._packet[at:]
        super().data_received(self._packet)

    def _begin_head(self) -> None:
        self._in_head = True
        self._body_bytes = self._other_bytes = 0
        self._end_wait()
        self._too_late = self.loop.call_later(HEAD_S, self._give_up)

    def _end_wait(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _give_up(self) -> None:
        message = f"the headers did not arrive within {HEAD_S:g} s"
        self._refuse(problem(408, "request_timeout", message))

    def _refuse(self, why: HttpProblem, drain_bytes: int = REFUSED_BYTES) -> None:
        """Answer without the application, after the answers to earlier requests, and close the connection."""
        self._end_wait()
        self._refusal, self._drain_bytes = why, drain_bytes
        cycle = self.cycle
        # The application was to answer this request.
        if self._in_message and not self._in_head:
            if self.pipeline:
                self.pipeline.popleft()
                return
            if cycle.response_started:
                return self.transport.close()
            cycle.disconnected = cycle.response_complete = True
            cycle.message_event.set()
        elif cycle is not None and not cycle.response_complete:
            return
        self._end_with(why)

    def _end_with(self, why: HttpProblem) -> None:
        """Send the last answer, and close the connection."""
        if self.transport.is_closing():
            return
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(why.content)),
            (b"connection", b"close"),
        ]
        head = f"HTTP/1.1 {why.status} {HTTPStatus(why.status).phrase}\r\n".encode()
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"%b%b\r\n%b" % (head, lines, why.content))
        self._linger()

    def hang_up(self) -> None:
        """Close the connection after an answer that was sent; later requests on it get none."""
        if not self.transport.is_closing():
            self.pipeline.clear()
            self.flow.resume_reading()
            self._drain_bytes = DRAIN_BYTES if self._in_message else REFUSED_BYTES
            # TLS has no half of a connection to shut down, and an answer may end only where its connection does.
            if not self._in_message and not self.transport.can_write_eof():
                return self.transport.close()
            self._linger()

    def _linger(self) -> None:
        """Shut down writing, and read for a while: the client can lose the answer if unread bytes are left."""
        self._hung_up = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.server_state.silent[self] = None
        self._end_wait()
        self._unset_keepalive_if_required()
        self._too_late = self.loop.call_later(DRAIN_S, self.transport.close)
