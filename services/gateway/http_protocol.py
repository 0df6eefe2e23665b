"""HTTP/1.1 as the gateway speaks it: httptools' parser, with bounds on what comes before a body."""

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.problems import ErrorReply, Problem, problem

MAX_HEAD_BYTES = (
    64 << 10
)  # of a request's first line and headers, beside what came in the same packet
HEAD_S = 30.0  # for them to arrive
UNSENT_BYTES = (64 << 10, 16 << 10)  # from which on writers wait, and down to which


class BoundedHttp(HttpToolsProtocol):
    """One connection. A head that is too long or too slow ends it with an answer that says so.

    The parser itself would collect a header that never ends for ever.
    """

    _head_bytes = 0
    _in_head = True
    _too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects has something to ask."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(*UNSENT_BYTES)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone, or was let go."""
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of one request, or of several."""
        before = self._in_head
        super().data_received(data)
        if self._in_head and before and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                message = f"the headers must be at most {MAX_HEAD_BYTES} bytes"
                self._refuse(problem(431, "request_too_large", message))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if not self._in_head:
            self._begin_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is whole; its request may be answered."""
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered as every other error."""
        self._refuse(problem(400, "invalid_request", "the request is not valid HTTP/1.1"))

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._too_late = self.loop.call_later(HEAD_S, self._give_up)

    def _end_head(self) -> None:
        self._in_head = False
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _give_up(self) -> None:
        message = f"the headers did not arrive within {HEAD_S:g} s"
        self._refuse(problem(408, "request_timeout", message))

    def _refuse(self, why: Problem) -> None:
        """Answer past the application, which has never seen this request, and hang up."""
        self._end_head()
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy:  # else the bytes would end up within the answer to the request before
            body = msgspec.json.encode(ErrorReply(why.body))
            head = (
                f"HTTP/1.1 {why.status} {HTTPStatus(why.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()
