"""A streamed answer on the wire: it ends with a finish reason or an error event, then ``[DONE]``."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.errors import MoesaicError
from moesaic.services.gateway import metrics
from moesaic.services.gateway.http import sse
from moesaic.services.gateway.http.disconnect import ClientClosed, while_connected
from moesaic.services.gateway.http.problems import (
    ErrorReply,
    HttpProblem,
    internal_error,
    problem_of,
)
from moesaic.services.gateway.http.request_record import RequestRecord
from moesaic.services.gateway.workers.failures import SlowClient

log = structlog.get_logger()

KEEP_ALIVE_S = 15.0  # proxies cut off a stream that is silent, most of them after 30 s or more
SEND_S = 30.0  # longest time that a client may take to read what is sent at once


class EventStream(Response):
    """Sends chunks as they come.

    ``chunks`` gives server-sent events and, last of all, an empty chunk: the sign that the answer is complete.
    If it fails before the first chunk, the answer is an ordinary error.
    """

    media_type = "text/event-stream"

    def __init__(
        self, record: RequestRecord, chunks: AsyncGenerator[bytes, None], keep_alive_s: float
    ) -> None:
        super().__init__(headers=dict(sse.HEADERS))
        del self.headers["content-length"]
        self._record, self._chunks, self._keep_alive_s = record, chunks, keep_alive_s
        self._ended = False  # the last bytes are on their way: what comes then is no leaving
        record.stream = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop as soon as the client has gone."""
        try:
            await while_connected(receive, self._write(scope, receive, send), lambda: self._ended)
        except ClientClosed as error:
            self._record.fail(problem_of(error))

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with (
            aclosing(self._chunks) as chunks,
            _Body(send, self.raw_headers, self._keep_alive_s) as body,
        ):
            try:
                if (ending := await self._copy(chunks, body)) is not None:
                    self._record.fail(ending)
                    await body.stop_comments()
                    if not body.begun:
                        self._ended = True
                        return await ending.response()(scope, receive, send)
                    await body.write(sse.event(ErrorReply(ending.body)))
                self._ended = True
                await body.write(sse.DONE, last=True)
            except TimeoutError:
                # Nothing more can be sent: the connection breaks, which is no silent end.
                self._record.fail(problem_of(SlowClient()))

    async def _copy(self, chunks: AsyncGenerator[bytes, None], body: "_Body") -> HttpProblem | None:
        """Send all chunks.

        Returns:
            The problem that ended them early, if any did.
        """
        complete = False
        try:
            async for chunk in chunks:
                complete = not chunk
                await body.write(chunk)
        except MoesaicError as error:
            return problem_of(error)
        except TimeoutError:
            raise
        except Exception:
            log.exception("stream.failed", request_id=self._record.request_id)
            return internal_error(self._record.request_id)
        if complete:
            return None
        metrics.truncations.inc()
        log.error("stream.truncated", request_id=self._record.request_id)
        return internal_error(self._record.request_id)


class _Body:
    """The body of a response: it begins with its first bytes, and has a comment line in each silence."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], every_s: float) -> None:
        self.begun = False
        self._send, self._headers, self._every_s = send, headers, every_s
        self._loop = asyncio.get_running_loop()
        self._sending = asyncio.Lock()
        self._wrote_at = self._loop.time()
        self._looking = self._loop.call_later(every_s, self._look)
        self._beat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "_Body":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop_comments()

    async def stop_comments(self) -> None:
        """Send no more of them."""
        self._looking.cancel()
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes; waits for a client that reads slowly, but not for ever."""
        if not data and not last:
            return
        self._wrote_at = self._loop.time()
        async with asyncio.timeout(SEND_S), self._sending:
            if not self.begun:
                head = {"type": "http.response.start", "status": 200, "headers": self._headers}
                await self._send(head)
                self.begun = True
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    def _look(self) -> None:
        """Send a comment after each silence."""
        left_s = self._wrote_at + self._every_s - self._loop.time()
        if left_s <= 0:
            if self._beat is None or self._beat.done():
                self._beat = self._loop.create_task(self._keep_alive())
            left_s = self._every_s
        self._looking = self._loop.call_later(left_s, self._look)

    async def _keep_alive(self) -> None:
        with suppress(TimeoutError):  # the next write finds that the client does not read
            await self.write(sse.KEEP_ALIVE)
