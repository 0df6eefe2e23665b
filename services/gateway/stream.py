"""A streamed answer on the wire: it always ends with a finish reason or an error event, then ``[DONE]``."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.errors import MoesaicError
from services.gateway import metrics, sse
from services.gateway.disconnect import ClientClosed, gone
from services.gateway.exchange import Exchange
from services.gateway.execution import SlowClient
from services.gateway.problems import Problem, internal_error, problem_of

log = structlog.get_logger()

SEND_S = 30.0  # longest time that a client may take to read what is sent at once


class EventStream(Response):
    """Sends chunks as they come.

    ``chunks`` gives server-sent events and, last of all, an empty chunk: the sign that the answer is complete.
    If it fails before the first chunk, the answer is an ordinary error.
    """

    media_type = "text/event-stream"

    def __init__(
        self, exchange: Exchange, chunks: AsyncGenerator[bytes, None], keep_alive_s: float
    ) -> None:
        super().__init__(headers=dict(sse.HEADERS))
        del self.headers["content-length"]
        self._exchange, self._chunks, self._keep_alive_s = exchange, chunks, keep_alive_s
        self._ended = False  # the last bytes are on their way: what comes then is no leaving
        exchange.stream = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop as soon as the client has gone."""
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done() or self._ended:
                await writing
            else:
                self._exchange.fail(problem_of(ClientClosed()))
        finally:
            writing.cancel()
            leaving.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks) as chunks:
            first = asyncio.ensure_future(anext(chunks))
            try:
                await asyncio.wait({first}, timeout=self._keep_alive_s)
                if first.done() and isinstance(error := first.exception(), MoesaicError):
                    self._ended = True
                    self._exchange.fail(problem := problem_of(error))
                    await problem.response()(scope, receive, send)
                    return
                await self._stream(first, chunks, send)
            finally:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)

    async def _stream(
        self, first: asyncio.Future[bytes], chunks: AsyncGenerator[bytes, None], send: Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body = _Body(send)
        beating = asyncio.ensure_future(body.keep_alive(self._keep_alive_s))
        try:
            ending = await self._copy(first, chunks, body)
            if ending is not None:
                self._exchange.fail(ending)
                await body.write(sse.event({"error": ending.body}))
            self._ended = True
            await body.write(sse.DONE, last=True)
        except TimeoutError:
            # Nothing more can be sent: the connection breaks, which is no silent end.
            self._exchange.fail(problem_of(SlowClient()))
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _copy(
        self, first: asyncio.Future[bytes], chunks: AsyncGenerator[bytes, None], body: "_Body"
    ) -> Problem | None:
        """Send all chunks; gives what went wrong."""
        complete = False
        try:
            chunk = await first
            while True:
                complete = not chunk
                await body.write(chunk)
                chunk = await anext(chunks)
        except StopAsyncIteration:
            if complete:
                return None
            metrics.truncations.inc()
            log.error("stream.truncated", request_id=self._exchange.request_id)
            return internal_error(self._exchange.request_id)
        except MoesaicError as error:
            return problem_of(error)
        except TimeoutError:
            raise
        except Exception:
            log.exception("stream.failed", request_id=self._exchange.request_id)
            return internal_error(self._exchange.request_id)


class _Body:
    """The body of a response, with a comment line now and then if there is nothing else to send."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._wrote_at = asyncio.get_running_loop().time()

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes; waits for a client that reads slowly, but not for ever."""
        if data or last:
            self._wrote_at = asyncio.get_running_loop().time()
            async with asyncio.timeout(SEND_S):
                await self._send(
                    {"type": "http.response.body", "body": data, "more_body": not last}
                )

    async def keep_alive(self, every_s: float) -> None:
        """Send a comment after each silence."""
        while True:
            idle_s = asyncio.get_running_loop().time() - self._wrote_at
            if idle_s >= every_s:
                await self.write(sse.KEEP_ALIVE)
            else:
                await asyncio.sleep(every_s - idle_s)
