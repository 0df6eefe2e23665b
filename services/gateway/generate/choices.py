"""One choice as text, growing: tokens in, printable pieces out, up to its end or a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moesaic.services.gateway.generate.stopping import StopFinder
from moesaic.v1.attention_pb2 import FINISH_REASON_LENGTH, Finished, TokenLogprob, Tokens

FinishReason = Literal["stop", "length"]


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

    def __init__(self, index: int, decoder: TextDecoder, ending: Ending) -> None:
        self.index = index
        self.num_tokens = 0
        self.finished = False
        self._decoder, self._ending = decoder, ending
        self._finder = StopFinder(ending.stops, include=ending.include_stop)

    def feed(self, tokens: Tokens) -> Piece:
        """Take tokens. If they complete a stop string, the piece has a finish reason and the rest is dropped."""
        text, used = [], 0
        for token_id in tokens.token_ids:
            used += 1
            self.num_tokens += 1
            new = self._decoder.feed([token_id])
            text.append(
                self._finder.feed(new) if self.num_tokens > self._ending.min_tokens else new
            )
            if self._finder.hit is not None:
                break
        piece = Piece(
            self.index, "".join(text), list(tokens.token_ids[:used]), tokens.logprobs[:used]
        )
        if self._finder.hit is not None:
            self.finished = True
            piece.finish_reason, piece.stop_reason = "stop", self._finder.hit
        return piece

    def finish(self, finished: Finished) -> Piece:
        """Take the worker's last word. The end token is a token of the answer, though its text is not shown."""
        self.finished = True
        text = self._finder.feed(self._decoder.flush())
        if self._finder.hit is None:
            text += self._finder.flush()
        if finished.reason == FINISH_REASON_LENGTH and self._finder.hit is None:
            return Piece(self.index, text, [], finish_reason="length")
        piece = Piece(self.index, text, [], finish_reason="stop", stop_reason=self._finder.hit)
        if finished.HasField("stop_token_id"):
            self.num_tokens += 1
            piece.token_ids = [finished.stop_token_id]
            if finished.HasField("stop_logprob"):
                piece.logprobs = [finished.stop_logprob]
            if self._finder.hit is None:
                if finished.stop_token_id in self._ending.stop_token_ids:
                    piece.stop_reason = finished.stop_token_id
                if self._ending.include_stop:
                    piece.text += self._decoder.feed(piece.token_ids) + self._decoder.flush()
        return piece
