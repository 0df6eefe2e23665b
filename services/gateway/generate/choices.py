"""One choice as text, growing: tokens in, printable pieces out, up to its end or a stop string."""

from collections.abc import Iterable, Sequence
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
    """One answer, up to its end.

    Stop strings are searched only in the content that the caller gets. If a reader splits the answer, they are not
    searched in reasoning and calls, and a match lies within one part.
    """

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
        for token_id in tokens.token_ids:
            self.num_tokens += 1
            piece.token_ids.append(token_id)
            if self._reader is not None:
                self.num_reasoning_tokens += self._reader.reasoning
            self._take(piece, self._decoder.feed([token_id]))
            if self._finder.hit is not None or self._is_read:
                break
        piece.logprobs = tokens.logprobs[: len(piece.token_ids)]
        if self._finder.hit is not None or self._is_read:
            return self._ended(piece, "stop")
        return piece

    def finish(self, finished: Finished) -> Piece:
        """Take the worker's last word. The end token is a token of the answer, though its text is not shown."""
        piece = Piece(self.index, "", [])
        self._take(piece, self._decoder.flush())
        if finished.reason == FINISH_REASON_LENGTH:
            return self._ended(piece, "length")
        stop_reason: int | None = None
        if finished.HasField("stop_token_id"):
            self.num_tokens += 1
            piece.token_ids = [finished.stop_token_id]
            if finished.HasField("stop_logprob"):
                piece.logprobs = [finished.stop_logprob]
            if finished.stop_token_id in self._ending.stop_token_ids:
                stop_reason = finished.stop_token_id
            if self._ending.include_stop and self._finder.hit is None:
                self._release(piece)
                self._finder = StopFinder(())  # an end token is not a stop string
                self._take(piece, self._decoder.feed(piece.token_ids) + self._decoder.flush())
        return self._ended(piece, "stop", stop_reason)

    @property
    def _is_read(self) -> bool:
        return self._reader is not None and self._reader.done

    def _take(self, piece: Piece, text: str) -> None:
        if self._reader is None:
            piece.text += self._searched(text)
        else:
            self._put(piece, self._reader.feed(text))

    def _put(self, piece: Piece, parts: Iterable[Part]) -> None:
        """Add parts to a piece, up to the first stop string in their content."""
        for part in parts:
            if self._finder.hit is not None:
                return
            if part.kind != "content":
                self._release(piece)
                piece.parts.append(part)
                self.called = self.called or part.kind == "call"
            elif text := self._searched(part.text):
                piece.parts.append(Part("content", text))

    def _searched(self, text: str) -> str:
        """Search stop strings; returns the text that no stop string can take back."""
        return self._finder.feed(text) if self.num_tokens > self._ending.min_tokens else text

    def _release(self, piece: Piece) -> None:
        """Release the withheld text, since no stop string can continue from it."""
        held = self._finder.flush()
        if held and self._reader is not None:
            piece.parts.append(Part("content", held))
        else:
            piece.text += held

    def _ended(self, piece: Piece, reason: FinishReason, stop: int | None = None) -> Piece:
        self.finished = True
        if self._reader is not None:
            self._put(piece, self._reader.finish())
        self._release(piece)
        hit = self._finder.hit
        piece.finish_reason, piece.stop_reason = (
            ("stop", hit) if hit is not None else (reason, stop)
        )
        if piece.finish_reason == "stop" and self.called and hit is None:
            piece.finish_reason = "tool_calls"
        return piece
