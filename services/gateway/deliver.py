"""Bringing answers to the client, all at once or as a stream, in the shape of the route."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway import sse
from services.gateway.choices import Piece
from services.gateway.disconnect import while_connected
from services.gateway.execution import Deadline
from services.gateway.fields import GenerationWire, StreamOptions
from services.gateway.gateway import Gateway, exchange_of
from services.gateway.generation import Answers, joined
from services.gateway.replies import Envelope, PromptLogprobs, reply
from services.gateway.stream import EventStream

Choices = list[Any]


class Shape(Protocol):
    """How one route words its choices."""

    @property
    def whole_type(self) -> type[Envelope]:
        """What a complete answer is."""
        ...

    @property
    def chunk_type(self) -> type[Envelope]:
        """What each event of a stream is."""
        ...

    def opening(self) -> Choices:
        """Chunks before the first piece."""
        ...

    def chunks(self, piece: Piece) -> Choices:
        """Chunks for one piece; the last one has the finish reason."""
        ...

    def whole(self, piece: Piece) -> Any:
        """A complete choice."""
        ...


@dataclass(frozen=True)
class Delivery:
    """One request's answers on their way to the client."""

    gateway: Gateway
    body: GenerationWire
    answers: Answers
    shape: Shape
    answer_id: str
    deadline: Deadline
    prompt_token_ids: list[int] | None = None  # put beside the choices
    prompt_logprobs: Callable[[], PromptLogprobs] | None = None  # the same, once they are known
    created: int = field(default_factory=lambda: int(time.time()))

    async def respond(self, request: Request) -> Response:
        """Make the answers while the client stays connected."""
        if self.body.stream:
            keep_alive_s = self.gateway.settings.keep_alive_s
            return EventStream(exchange_of(request), self._stream(), keep_alive_s)
        return await while_connected(request.receive, self._whole())

    async def _whole(self) -> Response:
        pieces = [
            p async for batch in self.answers.pieces(self.answer_id, self.deadline) for p in batch
        ]

        def put_together() -> Response:
            choices = sorted((self.shape.whole(p) for p in joined(pieces)), key=lambda c: c.index)
            envelope = self._envelope(self.shape.whole_type, choices)
            envelope.usage, envelope.moesaic = self.answers.usage, self.answers.provenance
            if self.prompt_logprobs is not None:
                envelope.prompt_logprobs = self.prompt_logprobs()
            return reply(envelope)

        num_chars = self._num_chars(sum(len(piece.token_ids) for piece in pieces))
        return await self.gateway.language.work(num_chars, put_together)

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options or StreamOptions()
        opened = False
        pieces = self.answers.pieces(self.answer_id, self.deadline)
        try:
            async for batch in pieces:
                first = not opened  # which may have the log-probabilities of the prompt
                num_chars = self._num_chars(0) if first or getattr(self.body, "echo", None) else 0
                choices = await self.gateway.language.work(num_chars, self._chunks, batch, first)
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
                    yield await self.gateway.language.work(num_chars, _events, envelopes)
        finally:
            await pieces.aclose()
        if options.include_usage:
            last = self._envelope(self.shape.chunk_type, [])
            last.usage = self.answers.usage
            yield sse.event(last)
        yield b""

    def _chunks(self, batch: Iterable[Piece], first: bool) -> Choices:
        choices = self.shape.opening() if first else []
        for piece in batch:
            choices += self.shape.chunks(piece)
        return choices

    def _num_chars(self, num_tokens: int) -> int:
        """What putting an answer of so many tokens together costs, as text: little without log-probabilities."""
        wanted = [
            getattr(self.body, name, None)
            for name in ("top_logprobs", "logprobs", "prompt_logprobs")
        ]
        most = max((int(count) for count in wanted if count is not None), default=None)
        if most is None:
            return 0
        echoes = getattr(self.body, "echo", None) or self.body.prompt_logprobs is not None
        return (num_tokens + echoes * self.answers.prompt_tokens) * (most + 1)

    def _envelope(self, kind: type[Envelope], choices: Choices) -> Envelope:
        envelope = kind(
            id=self.answer_id,
            created=self.created,
            model=self.gateway.model_name,
            system_fingerprint=self.gateway.system_fingerprint,
            choices=choices,
        )
        if self.prompt_token_ids is not None and kind is self.shape.whole_type:
            envelope.prompt_token_ids = self.prompt_token_ids
        return envelope


def _events(envelopes: Iterable[Envelope]) -> bytes:
    return b"".join(map(sse.event, envelopes))


def answer_id(prefix: str) -> str:
    """A fresh id, such as ``chatcmpl-…``."""
    return f"{prefix}-{secrets.token_hex(12)}"


def token_texts(gateway: Gateway, body: GenerationWire) -> Callable[[int], str]:
    """How tokens are named among log-probabilities."""
    if body.return_tokens_as_token_ids:
        return lambda token_id: f"token_id:{token_id}"
    return gateway.language.token_text


def ids_if(wanted: bool, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
    """Token ids, if the caller wants them."""
    return token_ids if wanted else msgspec.UNSET
