"""Delivery of answers to the client, all at once or as a stream, in the shape of the route."""

from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moesaic.services.gateway.admission import Admitted
from moesaic.services.gateway.fields.generating import GenerationWire, StreamOptions
from moesaic.services.gateway.gateway import Gateway
from moesaic.services.gateway.generate.answers import PER_ANSWER_CHARS, Answers, joined
from moesaic.services.gateway.generate.choices import Piece
from moesaic.services.gateway.generate.stream import KEEP_ALIVE_S, EventStream
from moesaic.services.gateway.http import sse
from moesaic.services.gateway.http.disconnect import while_connected
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.replies.generating import Envelope, PromptLogprobs

Choices = list[Any]


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
                first = not opened  # which may have the log-probabilities of the prompt
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
            yield sse.event(last)
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
    return b"".join(map(sse.event, envelopes))


def ids_if(wanted: bool, token_ids: list[int]) -> list[int] | msgspec.UnsetType:
    """Give token ids, if the caller wants them."""
    return token_ids if wanted else msgspec.UNSET
