"""Choices of ``/v1/chat/completions``, whole and in chunks."""

from collections.abc import Callable
from dataclasses import dataclass

from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.generate.choices import Piece
from moesaic.services.gateway.generate.deliver import Choices, ids_if
from moesaic.services.gateway.replies.generating import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChatMessage,
    Delta,
)
from moesaic.services.gateway.replies.logprobs import chat_logprobs


@dataclass(frozen=True)
class ChatShape:
    """Assistant's turns."""

    body: ChatWire
    text_of: Callable[[int], str]
    whole_type = ChatCompletion
    chunk_type = ChatCompletionChunk

    def opening(self) -> Choices:
        """Each choice begins with its role."""
        delta = Delta(role="assistant", content="")
        return [ChatChunkChoice(index=i, delta=delta) for i in range(self.body.n)]

    def chunks(self, piece: Piece) -> Choices:
        """Text first, the finish reason with an empty delta."""
        chunks: Choices = []
        if piece.text or (piece.token_ids and (self.body.logprobs or self.body.return_token_ids)):
            chunks.append(
                ChatChunkChoice(
                    index=piece.index,
                    delta=Delta(content=piece.text),
                    logprobs=self._logprobs(piece),
                    token_ids=ids_if(self.body.return_token_ids, piece.token_ids),
                )
            )
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
            message=ChatMessage(piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=ids_if(self.body.return_token_ids, piece.token_ids),
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self.body.logprobs:
            return None
        return chat_logprobs(piece.token_ids, piece.logprobs, self.text_of)
