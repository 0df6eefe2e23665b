"""Delivery of answers to the client, whole or as server-sent events that are kept alive and always ended."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moesaic.errors import MoesaicError
from moesaic.services.gateway import metrics
from moesaic.services.gateway.fields.generating import GenerationWire, StreamOptions
from moesaic.services.gateway.gateway import Admitted, Gateway
from moesaic.services.gateway.generate.answers import PER_ANSWER_CHARS, Answers, Piece, joined
from moesaic.services.gateway.http.problems import (
    ErrorReply,
    HttpProblem,
    internal_error,
    problem_of,
)
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.http.request_record import (
    ClientClosed,
    RequestRecord,
    while_connected,
)
from moesaic.services.gateway.replies.generating import Envelope, PromptLogprobs
from moesaic.services.gateway.workers.run import SlowClient

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encoder = msgspec.json.Encoder()
# Line separators to many a client's line splitter, though JSON lets them stand unescaped.
_SEPARATORS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)
log = structlog.get_logger()
KEEP_ALIVE_S = 15.0  # proxies cut off a stream that is silent, most of them after 30 s or more
SEND_S = 30.0  # longest time that a client may take to read what is sent at once
Choices = list[Any]


def event(value: Any, name: str = "") -> bytes:
    """Encode one event that carries ``value`` as JSON, under a name if its API names events."""
    text = _encoder.encode(value)
    for separator, escaped in _SEPARATORS:
        if separator in text:
            text = text.replace(separator, escaped)
    line = b"event: %s\n" % name.encode() if name else b""
    return line + b"data: " + text + b"\n\n"


@dataclass(frozen=True)
class StreamEnd:
    """The last bytes of a stream of events, as one API has them."""

    done: bytes = DONE  # behind a complete answer, and behind a problem
    failed: Callable[[HttpProblem], bytes] = lambda ending: event(ErrorReply(ending.body))


OPENAI_END = StreamEnd()


class EventStream(Response):
    """Sends chunks as they come.

    ``chunks`` gives server-sent events and, last of all, an empty chunk: the sign that the answer is complete.
    If it fails before the first chunk, the answer is an ordinary error.
    """

    def __init__(
        self,
        record: RequestRecord,
        chunks: AsyncGenerator[bytes, None],
        keep_alive_s: float,
        end: StreamEnd = OPENAI_END,
    ) -> None:
        # Not ``Response``'s own, which would make the same headers for each stream.
        self.raw_headers = list(SSE_HEADERS)
        self._record, self._chunks = record, chunks
        self._keep_alive_s, self._end = keep_alive_s, end
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
                    await body.write(self._end.failed(ending))
                self._ended = True
                await body.write(self._end.done, last=True)
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
        # The next write finds that the client does not read.
        with suppress(TimeoutError):
            await self.write(KEEP_ALIVE)


class AnswerShape(Protocol):
    """One route's form of choices."""

    @property
    def whole_type(self) -> type[Envelope]:
        """Type of a complete answer."""
        ...

    @property
    def chunk_type(self) -> type[Envelope]:
        """Type of each event of a stream."""
        ...

    def opening(self) -> Choices:
        """Make the chunks before the first piece."""
        ...

    def chunks(self, piece: Piece) -> Choices:
        """Make the chunks of one piece; the last one has the finish reason."""
        ...

    def whole(self, piece: Piece) -> Any:
        """Make a complete choice."""
        ...


@dataclass(frozen=True)
class Delivery:
    """One request's answers on their way to the client."""

    admitted: Admitted[GenerationWire]
    answers: Answers
    shape: AnswerShape
    prompt_token_ids: list[int] | None = None  # put beside the choices
    prompt_logprobs: Callable[[], PromptLogprobs] | None = None  # the same, once they are known

    @property
    def _gateway(self) -> Gateway:
        return self.admitted.gateway

    @property
    def _body(self) -> GenerationWire:
        return self.admitted.body

    async def respond(self, request: Request) -> Response:
        """Make the answers while the client stays connected."""
        if self._body.stream:
            return EventStream(self.admitted.record, self._stream(), KEEP_ALIVE_S)
        return await while_connected(request.receive, self._whole())

    async def _whole(self) -> Response:
        pieces = [piece async for batch in self.answers.pieces() for piece in batch]

        def put_together() -> Response:
            choices = sorted((self.shape.whole(p) for p in joined(pieces)), key=lambda c: c.index)
            envelope = self._envelope(self.shape.whole_type, choices)
            envelope.usage, envelope.moesaic = self.answers.usage, self.answers.provenance
            if self.prompt_logprobs is not None:
                envelope.prompt_logprobs = self.prompt_logprobs()
            return reply(envelope)

        num_chars = self._num_chars(sum(len(piece.token_ids) for piece in pieces))
        num_chars += len(self.answers.runs) * PER_ANSWER_CHARS
        return await self._gateway.language.work(num_chars, put_together)

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        options = self._body.stream_options or StreamOptions()
        opened = False
        pieces = self.answers.pieces()
        try:
            async for batch in pieces:
                # Which may have the log-probabilities of the prompt.
                first = not opened
                num_chars = self._num_chars(0) if first or getattr(self._body, "echo", None) else 0
                choices = await self._gateway.language.work(num_chars, self._chunks, batch, first)
                envelopes = [self._envelope(self.shape.chunk_type, [choice]) for choice in choices]
                if envelopes and all(choice.finished for choice in self.answers.choices):
                    envelopes[-1].moesaic = self.answers.provenance
                if envelopes and not opened and self.prompt_token_ids is not None:
                    envelopes[0].prompt_token_ids = self.prompt_token_ids
                for envelope in envelopes:
                    if options.include_usage:
                        usage = self.answers.usage if options.continuous_usage_stats else None
                        envelope.usage = usage
                opened = True
                if envelopes:
                    yield await self._gateway.language.work(num_chars, _events, envelopes)
        finally:
            await pieces.aclose()
        if options.include_usage:
            last = self._envelope(self.shape.chunk_type, [])
            last.usage = self.answers.usage
            yield event(last)
        yield b""

    def _chunks(self, batch: Iterable[Piece], first: bool) -> Choices:
        choices = self.shape.opening() if first else []
        for piece in batch:
            choices += self.shape.chunks(piece)
        return choices

    def _num_chars(self, num_tokens: int) -> int:
        """Estimate the cost of an answer of so many tokens, as text: little without log-probabilities."""
        wanted = [
            getattr(self._body, name, None)
            for name in ("top_logprobs", "logprobs", "prompt_logprobs")
        ]
        most = max((int(count) for count in wanted if count is not None), default=None)
        if most is None:
            return 0
        echoes = getattr(self._body, "echo", None) or self._body.prompt_logprobs is not None
        return (num_tokens + echoes * self.answers.prompt_tokens) * (most + 1)

    def _envelope(self, kind: type[Envelope], choices: Choices) -> Envelope:
        envelope = kind(
            id=self.admitted.answer_id,
            created=self.admitted.created,
            model=self._gateway.model_name,
            system_fingerprint=self._gateway.system_fingerprint,
            choices=choices,
        )
        if self.prompt_token_ids is not None and kind is self.shape.whole_type:
            envelope.prompt_token_ids = self.prompt_token_ids
        return envelope


def _events(envelopes: Iterable[Envelope]) -> bytes:
    return b"".join(map(event, envelopes))


def ids_if(wanted: bool, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
    """Give token ids, if the caller wants them."""
    return token_ids if wanted else msgspec.UNSET
