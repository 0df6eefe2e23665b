"""Answers of Anthropic's API: blocks of content as they grow, whole or as a stream of typed events."""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from moesaic.models.text.dialects.reader import Part
from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.gateway import Admitted
from moesaic.services.gateway.generate.answers import Piece, joined
from moesaic.services.gateway.generate.conversation import Conversation
from moesaic.services.gateway.generate.deliver import KEEP_ALIVE_S, EventStream, StreamEnd, event
from moesaic.services.gateway.http.anthropic_errors import anthropic_body
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.http.request_record import while_connected
from moesaic.services.gateway.replies.anthropic import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageReply,
    MessageStart,
    MessageStop,
    Ping,
    ReplyBlock,
    SignatureDelta,
    StopFields,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    usage_as_anthropic,
)

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BLOCK_OF = {"content": TextBlock, "reasoning": ThinkingBlock}
_DELTA_OF: dict[str, Callable[[str], TextDelta | ThinkingDelta | InputJsonDelta]] = {
    "content": TextDelta,
    "reasoning": ThinkingDelta,
    "arguments": InputJsonDelta,
}
Events = list[MessageEvent]


@dataclass
class GrowingContent:
    """The blocks of one answer.

    Attributes:
        conversation: that it answers.
        hides_thinking: thinking blocks stay empty.
        blocks: so far; the last one may be growing.
    """

    conversation: Conversation
    hides_thinking: bool = False
    blocks: list[ReplyBlock] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)  # of the block that grows

    def feed(self, piece: Piece) -> Events:
        """Take a piece; give the events that tell it."""
        events: Events = []
        for part in self.conversation.shape.parts(piece):
            events += self._take(part)
        return events

    def close(self) -> Events:
        """End the block that grows."""
        if not self.blocks:
            return []
        block, index, text = self.blocks[-1], len(self.blocks) - 1, "".join(self._texts)
        self._texts.clear()
        events: Events = [ContentBlockStop(index)]
        if isinstance(block, ToolUseBlock):
            block.input = _arguments(text)
        elif isinstance(block, TextBlock):
            block.text = text
        else:
            block.thinking = text
            events.insert(0, ContentBlockDelta(index, SignatureDelta()))
        return events

    def _take(self, part: Part) -> Events:
        if part.kind == "call":
            call_id = self.conversation.shape.id_of(part)
            return self._begin(ToolUseBlock(call_id, part.text))
        events: Events = []
        if part.kind != "arguments":
            kind = _BLOCK_OF[part.kind]
            if not (self.blocks and isinstance(self.blocks[-1], kind)):
                events = self._begin(kind())
        if part.kind == "reasoning" and self.hides_thinking:
            return events
        self._texts.append(part.text)
        return [*events, ContentBlockDelta(len(self.blocks) - 1, _DELTA_OF[part.kind](part.text))]

    def _begin(self, block: ReplyBlock) -> Events:
        ended = self.close()
        self.blocks.append(block)
        # The event must not grow with the block.
        return [*ended, ContentBlockStart(len(self.blocks) - 1, copy(block))]


def _arguments(text: str) -> dict[str, Any]:
    """Read a call's arguments, as far as they were written."""
    try:
        told = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


@dataclass(frozen=True)
class MessageDelivery:
    """One message on its way to the client.

    Attributes:
        admitted: its request.
        conversation: that it answers.
        content: its blocks.
        fills_context: it may go on to the end of the context, where its caller allows more tokens than are left.
    """

    admitted: Admitted[ChatWire]
    conversation: Conversation
    content: GrowingContent
    fills_context: bool = False

    async def respond(self, request: Request) -> Response:
        """Make the message while the client stays connected."""
        record = self.admitted.record
        if not self.admitted.body.stream:
            return await while_connected(request.receive, self._whole())
        end = StreamEnd(
            done=b"",
            failed=lambda ending: event(anthropic_body(ending, record.request_id), "error"),
            keep_alive=_encoded([Ping()]),
        )
        return EventStream(record, self._stream(), KEEP_ALIVE_S, end)

    async def _whole(self) -> Response:
        answers = self.conversation.answers
        pieces = [piece async for batch in answers.pieces() for piece in batch]
        [piece] = joined(pieces)
        self.content.feed(piece)
        self.content.close()
        told = self._message(self.content.blocks)
        stop = self._stop_of(piece)
        told.stop_reason, told.stop_sequence = stop.stop_reason, stop.stop_sequence
        told.moesaic = answers.provenance
        return reply(told)

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        answers = self.conversation.answers
        pieces = answers.pieces()
        last: Piece | None = None
        try:
            async for batch in pieces:
                told: Events = [] if last is not None else [MessageStart(self._message([]))]
                for last in batch:
                    told += self.content.feed(last)
                if told:
                    yield _encoded(told)
        finally:
            await pieces.aclose()
        # An execution ends with the last word on each of its runs.
        assert last is not None
        usage = usage_as_anthropic(answers.usage)
        ending: Events = [
            *self.content.close(),
            MessageDelta(self._stop_of(last), usage, answers.provenance),
            MessageStop(),
        ]
        yield _encoded(ending)
        yield b""

    def _message(self, blocks: Sequence[ReplyBlock]) -> MessageReply:
        return MessageReply(
            id=self.admitted.answer_id.replace("-", "_", 1),
            model=self.admitted.gateway.model_name,
            content=list(blocks),
            usage=usage_as_anthropic(self.conversation.answers.usage),
        )

    def _stop_of(self, piece: Piece) -> StopFields:
        if isinstance(piece.stop_reason, str):
            return StopFields("stop_sequence", piece.stop_reason)
        if piece.finish_reason == "length" and self.fills_context:
            return StopFields("model_context_window_exceeded", None)
        return StopFields(_REASONS[piece.finish_reason or "stop"], None)


def _encoded(events: Iterable[MessageEvent]) -> bytes:
    return b"".join(event(one, str(one.__struct_config__.tag)) for one in events)
