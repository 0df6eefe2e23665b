"""One choice as text, growing: tokens in, printable pieces out, up to its end or a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from moesaic.models.text.dialects.reader import Part, Reader
from moesaic.services.gateway.generate.stopping import StopFinder
from moesaic.v1.attention_pb2 import FINISH_REASON_LENGTH, Finished, TokenLogprob, Tokens

FinishReason = Literal["stop", "length", "tool_calls"]


class TextDecoder(Protocol):
    """The part of ``moesaic.models.text.tokenizer.StreamDecoder`` that a choice needs."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Give the text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Give the text of tokens that complete nothing."""
        ...


@dataclass
class Piece:
    """New text and tokens of one choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprob] = ()
    parts: list[Part] = field(default_factory=list)  # the same text, where a reader takes it apart
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token that the caller asked for


@dataclass(frozen=True)
class Ending:
    """Ends of an answer besides the model's own end tokens."""

    stops: Sequence[str] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    min_tokens: int = 0  # stop strings count only after that many


class GrowingChoice:
    """One answer, up to its end."""

    def __init__(
        self, index: int, decoder: TextDecoder, ending: Ending, reader: Reader | None = None
    ) -> None:
        self.index = index
        self.num_tokens = self.num_reasoning_tokens = 0
        self.finished = self.called = False
        self._decoder, self._ending, self._reader = decoder, ending, reader
        self._finder = StopFinder(ending.stops, include=ending.include_stop)

    def feed(self, tokens: Tokens) -> Piece:
        """Take tokens. If they complete a stop string, or a call that is to be the only one, the piece has a finish
        reason and the rest is dropped.
        """
        piece = Piece(self.index, "", [])
        text, used = [], 0
        for token_id in tokens.token_ids:
            used += 1
            self.num_tokens += 1
            new = self._decoder.feed([token_id])
            text.append(
                self._finder.feed(new) if self.num_tokens > self._ending.min_tokens else new
            )
            if self._reader is not None:
                self.num_reasoning_tokens += self._reader.reasoning
                piece.parts += self._reader.feed(text[-1])
            if self._finder.hit is not None or (self._reader is not None and self._reader.done):
                break
        piece.text = "".join(text)
        piece.token_ids = list(tokens.token_ids[:used])
        piece.logprobs = tokens.logprobs[:used]
        if self._finder.hit is not None:
            return self._ended(piece, "stop", self._finder.hit)
        if self._reader is not None and self._reader.done:
            return self._ended(piece, "stop", None)
        self.called = self.called or any(part.kind == "call" for part in piece.parts)
        return piece

    def finish(self, finished: Finished) -> Piece:
        """Take the worker's last word. The end token is a token of the answer, though its text is not shown."""
        text = self._finder.feed(self._decoder.flush())
        if self._finder.hit is None:
            text += self._finder.flush()
        piece = Piece(self.index, text, [])
        if finished.reason == FINISH_REASON_LENGTH and self._finder.hit is None:
            return self._ended(self._read(piece), "length", None)
        stop_reason: str | int | None = self._finder.hit
        if finished.HasField("stop_token_id"):
            self.num_tokens += 1
            piece.token_ids = [finished.stop_token_id]
            if finished.HasField("stop_logprob"):
                piece.logprobs = [finished.stop_logprob]
            if self._finder.hit is None:
                if finished.stop_token_id in self._ending.stop_token_ids:
                    stop_reason = finished.stop_token_id
                if self._ending.include_stop:
                    piece.text += self._decoder.feed(piece.token_ids) + self._decoder.flush()
        return self._ended(self._read(piece), "stop", stop_reason)

    def _read(self, piece: Piece) -> Piece:
        if self._reader is not None:
            piece.parts += self._reader.feed(piece.text)
        return piece

    def _ended(self, piece: Piece, reason: FinishReason, stop: str | int | None) -> Piece:
        self.finished = True
        if self._reader is not None:
            piece.parts += self._reader.finish()
            self.called = self.called or any(part.kind == "call" for part in piece.parts)
        piece.finish_reason, piece.stop_reason = reason, stop
        if reason == "stop" and self.called and not isinstance(stop, str):
            piece.finish_reason = "tool_calls"
        return piece
