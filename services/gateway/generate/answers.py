"""Answers of a generating request: begun at the workers, growing as text, ended at a stop string."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from moesaic.models.text.dialects.reader import Part, Reader
from moesaic.models.text.tokenizer import StreamDecoder
from moesaic.services.gateway import metrics
from moesaic.services.gateway.fields.bodies import few
from moesaic.services.gateway.fields.generating import ChatWire, GenerationWire
from moesaic.services.gateway.gateway import Admitted
from moesaic.services.gateway.generate.runs import (
    LogprobCounts,
    bad_words_of,
    grammar_of,
    limits_of,
    runs_of,
)
from moesaic.services.gateway.generate.speech import PLAIN, Speech, unenforced_names
from moesaic.services.gateway.replies.accounts import Provenance, Usage, provenance_of, usage_of
from moesaic.services.gateway.workers.run import Run
from moesaic.telemetry.metrics import series
from moesaic.v1.attention_pb2 import FINISH_REASON_LENGTH, Finished, Grammar, TokenLogprob, Tokens

FinishReason = Literal["stop", "length", "tool_calls"]
PER_ANSWER_CHARS = 30  # what making one costs, as text


class StopFinder:
    """Withholds text that may be the beginning of a stop string until it is known.

    The stop string whose occurrence ends first wins, the longest of several that end together. The text that is shown
    does not depend on the pieces that it came in.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Take more text, give the part to show; after a hit, ``hit`` names it and nothing more is shown."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop)) >= 0
        ]
        if found:
            end, _, self.hit = min(found)
            self._held = ""
            return text[: end if self._include else end - len(self.hit)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Give the withheld text: no more is coming."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Measure the longest ending of ``text`` that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(text), len(stop) - 1), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


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
        series(metrics.answers_finished, piece.finish_reason or reason).inc()
        return piece


async def begin(
    admitted: Admitted[GenerationWire],
    prompts: Sequence[Sequence[int]],
    field: str,
    logprobs: LogprobCounts,
    default_max_tokens: int | None = None,
    speech: Speech = PLAIN,
) -> "Answers":
    """Make the runs of a request and charge its tenant for them; workers get them by ``Answers.pieces``.

    Args:
        admitted: the request.
        prompts: token ids of each prompt.
        field: field of the body that the prompts are from.
        logprobs: counts of log-probabilities to tell.
        default_max_tokens: tokens of an answer where neither the body nor the model says fewer; None: all that fit.
        speech: what the answers may be made of.

    Raises:
        InvalidInput: a prompt does not fit, or the fields contradict each other.
        TenantLimited: the tenant may not have so many tokens now.
    """
    gateway, body = admitted.gateway, admitted.body
    limits = limits_of(admitted, default_max_tokens)
    bad_words = await bad_words_of(gateway.language, body.bad_words)

    def prepared() -> Answers:
        grammar = _grammar(admitted, speech)
        runs = runs_of(admitted, prompts, field, limits, logprobs, bad_words, grammar)
        return Answers(admitted, runs, speech)

    size = admitted.record.num_bytes + len(prompts) * body.n * PER_ANSWER_CHARS
    answers = await gateway.language.work(size, prepared)
    admitted.record.charge_tokens(limits.bound * len(answers.runs))
    return answers


def _grammar(admitted: Admitted[GenerationWire], speech: Speech) -> Grammar | None:
    """Make the grammar of the answers, and note what it does not enforce for the answer's header."""
    asked, unenforced = grammar_of(admitted.body), dict[str, set[str]]()
    if asked.grammar is not None and speech.sets_aside(asked.grammar):
        asked.unenforced[:] = [asked.grammar.field]
    grammar = speech.grammar(asked.grammar, admitted.gateway.language.marker_id, unenforced)
    if unenforced and isinstance(admitted.body, ChatWire):
        asked.unenforced.extend(unenforced_names(admitted.body.tools or [], unenforced))
    admitted.record.ignored = few([*admitted.record.ignored, *asked.unenforced])
    return grammar


class Answers:
    """The answers to one request, growing."""

    def __init__(
        self, admitted: Admitted[GenerationWire], runs: Sequence[Run], speech: Speech = PLAIN
    ) -> None:
        self.runs = runs
        self._thinks = speech.dialect.thinks
        self._admitted = admitted
        self._finished: dict[int, Finished] = {}  # by run
        body, language = admitted.body, admitted.gateway.language
        ending = Ending(
            body.stops,
            frozenset(body.stop_token_ids),
            body.include_stop_str_in_output,
            body.min_tokens,
        )

        def decoder() -> StreamDecoder:
            skips = body.skip_special_tokens
            return language.decoder(skip_special_tokens=skips, kept=speech.markers)

        self.choices = [
            GrowingChoice(i, decoder(), ending, speech.reader()) for i in range(len(runs))
        ]
        self.prompt_tokens = sum(len(run.prompt) for run in runs[:: body.n])
        admitted.record.prompt_tokens = self.prompt_tokens

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Carry the request out and give each piece, until every choice has its finish reason."""
        record = self._admitted.record
        async with self._admitted.execution(self.runs) as execution:
            try:
                while events := await execution.next_events():
                    pieces = []
                    for i, event in events:
                        choice = self.choices[i]
                        if choice.finished:
                            # A stop string was found earlier in this batch.
                            continue
                        if isinstance(event, Tokens):
                            pieces.append(choice.feed(event))
                            if choice.finished:
                                execution.cancel(self.runs[i])
                        elif isinstance(event, Finished):
                            self._finished[i] = event
                            pieces.append(choice.finish(event))
                    # Not if only the prompts' log-probabilities came.
                    if pieces:
                        together = list(joined(pieces))
                        counts = [len(piece.token_ids) for piece in together]
                        record.note_tokens(sum(counts), max(counts))
                        yield together
            finally:
                record.attempts = sum(run.attempt for run in self.runs)
                record.cached_tokens = self._cached_tokens
                record.completion_tokens = self.usage.completion_tokens  # end tokens too

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        usage = usage_of(self.prompt_tokens, completion_tokens, self._cached_tokens)
        if self._thinks:
            num_reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
            usage.completion_tokens_details = {"reasoning_tokens": num_reasoning}
        return usage

    @property
    def provenance(self) -> Provenance:
        """Origin of the tokens, as far as workers told it: one that was stopped at a stop string does not."""
        wanted = self._admitted.body.moesaic.provenance
        return provenance_of(self._finished.values(), self.runs, self._cached_tokens, wanted)

    @property
    def _cached_tokens(self) -> int:
        """Count a prompt with several answers once, as the answer that found the least of it."""
        cached = 0
        n = self._admitted.body.n
        for first in range(0, len(self.runs), n):
            told = [self._finished.get(first + k) for k in range(n)]
            found = min(finished.cached_tokens if finished else 0 for finished in told)
            cached += min(found, len(self.runs[first].prompt))
        return cached


def joined(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """Join pieces of one choice that arrived together: a chunk each would only cost time."""
    joined: dict[int, Piece] = {}
    for piece in pieces:
        first = joined.setdefault(piece.index, piece)
        if first is not piece:
            first.text += piece.text
            first.token_ids += piece.token_ids
            first.parts += piece.parts
            first.logprobs = [*first.logprobs, *piece.logprobs]
            first.finish_reason, first.stop_reason = piece.finish_reason, piece.stop_reason
    return joined.values()
