"""Delivery of a response to the client, whole or as a stream of typed events."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass

import starlette.responses
from starlette.requests import Request

from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.fields.responses import Names
from moesaic.services.gateway.gateway import Admitted
from moesaic.services.gateway.generate.answers import PER_ANSWER_CHARS, Piece, joined
from moesaic.services.gateway.generate.conversation import Conversation
from moesaic.services.gateway.generate.deliver import KEEP_ALIVE_S, EventStream, StreamEnd, event
from moesaic.services.gateway.generate.transcript import Events, Transcript
from moesaic.services.gateway.http.problems import HttpProblem
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.http.request_record import while_connected
from moesaic.services.gateway.replies.responses import Response

Keep = Callable[[Response], Awaitable[None]]


@dataclass(frozen=True)
class ResponseDelivery:
    """One response on its way to the client.

    Attributes:
        admitted: its request, as a chat.
        conversation: the chat.
        transcript: its output.
        names: of the fields that errors name.
        keep: stores the complete response, before its client can know of it; None: it is not kept.
    """

    admitted: Admitted[ChatWire]
    conversation: Conversation
    transcript: Transcript
    names: Names
    keep: Keep | None = None

    async def respond(self, request: Request) -> starlette.responses.Response:
        """Make the response while the client stays connected."""
        if self.admitted.body.stream:
            end = StreamEnd(b"", self._failed)
            return EventStream(self.admitted.record, self._stream(), KEEP_ALIVE_S, end)
        return await while_connected(request.receive, self._whole())

    async def _whole(self) -> starlette.responses.Response:
        answers, work = self.conversation.answers, self.admitted.gateway.language.work
        pieces = [piece async for batch in answers.pieces() for piece in batch]
        num_chars = self._num_chars(pieces) + PER_ANSWER_CHARS
        await work(num_chars, self._take, list(joined(pieces)))
        self._end()
        if self.keep is not None:
            await self.keep(self.transcript.response)
        return await work(num_chars, reply, self.transcript.response)

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        work, pieces = self.admitted.gateway.language.work, self.conversation.answers.pieces()
        try:
            with self.names.told():
                async for batch in pieces:
                    if told := await work(self._num_chars(batch), self._told, batch):
                        yield told
        finally:
            await pieces.aclose()
        yield _encoded(self._end())
        if self.keep is not None:
            await self.keep(self.transcript.response)
        yield _encoded([self.transcript.last_event()])
        yield b""

    def _told(self, batch: list[Piece]) -> bytes:
        events = [] if self.transcript.begun else self.transcript.opening()
        return _encoded([*events, *self._take(batch)])

    def _take(self, batch: Iterable[Piece]) -> Events:
        chunks = (chunk for piece in batch for chunk in self.conversation.shape.chunks(piece))
        return [event for chunk in chunks for event in self.transcript.take(chunk)]

    def _end(self) -> Events:
        answers = self.conversation.answers
        return self.transcript.ended(answers.usage, answers.provenance)

    def _failed(self, problem: HttpProblem) -> bytes:
        return _encoded(self.transcript.failed(problem))

    def _num_chars(self, pieces: Iterable[Piece]) -> int:
        """Estimate the cost of some pieces, as text: little without log-probabilities."""
        body = self.admitted.body
        if not body.logprobs:
            return 0
        return sum(len(piece.token_ids) for piece in pieces) * ((body.top_logprobs or 0) + 1)


def _encoded(events: Events) -> bytes:
    return b"".join(event(one, one.type) for one in events)
