"""Choices of ``/v1/chat/completions``, whole and in chunks."""

from dataclasses import dataclass, field

import msgspec

from moesaic.models.text.dialects.reader import Part
from moesaic.models.text.spelling import SpelledText
from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.generate.choices import Piece
from moesaic.services.gateway.generate.deliver import Choices, ids_if
from moesaic.services.gateway.generate.speech import Speech
from moesaic.services.gateway.language import Language
from moesaic.services.gateway.replies.generating import (
    CalledFunctionReply,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    Delta,
    ToolCall,
    ToolCallDelta,
)
from moesaic.services.gateway.replies.logprobs import TokenNames, chat_logprobs


@dataclass(frozen=True)
class ChatShape:
    """Assistant's turns."""

    body: ChatWire
    language: Language
    speech: Speech
    num_calls: dict[int, int] = field(default_factory=dict)  # of each choice, as far as it was told
    begun: dict[int, SpelledText] = field(default_factory=dict)  # the text of each choice
    whole_type = ChatCompletion
    chunk_type = ChatCompletionChunk

    def opening(self) -> Choices:
        """Each choice begins with its role."""
        delta = Delta(role="assistant", content="")
        return [ChatChunkChoice(index=i, delta=delta) for i in range(self.body.n)]

    def chunks(self, piece: Piece) -> Choices:
        """A chunk for each part, the finish reason with an empty delta."""
        deltas = [self._delta(piece.index, part) for part in self._parts(piece)]
        if not deltas and piece.token_ids and (self.body.logprobs or self.body.return_token_ids):
            deltas = [Delta(content="")]
        chunks: Choices = [ChatChunkChoice(index=piece.index, delta=delta) for delta in deltas]
        if chunks:
            chunks[0].logprobs = self._logprobs(piece)
            chunks[0].token_ids = ids_if(self.body.return_token_ids, piece.token_ids)
        if piece.finish_reason:
            chunks.append(
                ChatChunkChoice(
                    index=piece.index,
                    delta=Delta(),
                    finish_reason=piece.finish_reason,
                    stop_reason=piece.stop_reason,
                )
            )
        return chunks

    def whole(self, piece: Piece) -> ChatChoice:
        """The assistant's turn."""
        return ChatChoice(
            index=piece.index,
            message=self._message(self._parts(piece)),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=ids_if(self.body.return_token_ids, piece.token_ids),
        )

    def _parts(self, piece: Piece) -> list[Part]:
        parts = piece.parts
        if self.speech.is_plain and piece.text:
            parts = [Part("content", piece.text)]
        if self.body.include_reasoning is False:
            return [part for part in parts if part.kind != "reasoning"]
        return parts

    def _delta(self, choice: int, part: Part) -> Delta:
        if part.kind == "content":
            return Delta(content=part.text)
        if part.kind == "reasoning":
            return Delta(reasoning=part.text, reasoning_content=part.text)
        if part.kind == "call":
            index = self.num_calls[choice] = self.num_calls.get(choice, -1) + 1
            function = CalledFunctionReply(part.text, "")
            call = ToolCallDelta(index, self._id_of(part), "function", function)
        else:
            call = ToolCallDelta(
                self.num_calls[choice], function=CalledFunctionReply(arguments=part.text)
            )
        return Delta(tool_calls=[call])

    def _message(self, parts: list[Part]) -> ChatMessage:
        texts: dict[str, list[str]] = {"content": [], "reasoning": []}
        calls: list[ToolCall] = []
        arguments: list[list[str]] = []
        for part in parts:
            if part.kind == "call":
                calls.append(ToolCall(self._id_of(part), CalledFunctionReply(part.text)))
                arguments.append([])
            elif part.kind == "arguments":
                arguments[-1].append(part.text)
            else:
                texts[part.kind].append(part.text)
        for call, pieces in zip(calls, arguments, strict=True):
            call.function.arguments = "".join(pieces)
        content, reasoning = ("".join(texts[kind]) for kind in ("content", "reasoning"))
        told = reasoning or msgspec.UNSET
        return ChatMessage(
            content=content or (None if calls else ""),
            reasoning=told,
            reasoning_content=told,
            tool_calls=calls or msgspec.UNSET,
        )

    def _id_of(self, part: Part) -> str:
        return part.call_id or self.speech.dialect.new_id()

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        if piece.index not in self.begun:
            skips, kept = self.body.skip_special_tokens, self.speech.markers
            decoder = self.language.decoder(skip_special_tokens=skips, kept=kept)
            self.begun[piece.index] = SpelledText(self.language.spelling, decoder)
        return chat_logprobs(piece.token_ids, piece.logprobs, self.names, self.begun[piece.index])

    @property
    def names(self) -> TokenNames:
        """The names of tokens in ``logprobs``."""
        return TokenNames(self.language.spelling, as_ids=self.body.return_tokens_as_token_ids)
