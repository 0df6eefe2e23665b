"""Choices of ``/v1/completions``, whole and in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.models.text.spelling import SpelledPrompt, SpelledText
from moesaic.services.gateway.fields.generating import CompletionWire
from moesaic.services.gateway.generate.choices import Piece
from moesaic.services.gateway.generate.deliver import Choices, ids_if
from moesaic.services.gateway.language import Language
from moesaic.services.gateway.replies.generating import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
)
from moesaic.services.gateway.replies.logprobs import (
    TokenNames,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from moesaic.services.gateway.workers.run import Run


@dataclass(frozen=True)
class CompletionShape:
    """Continuations of prompts, each behind its prompt where that is echoed."""

    body: CompletionWire
    runs: Sequence[Run]
    echoes: list[str] | None
    language: Language
    begun: dict[int, SpelledText] = field(default_factory=dict)  # the text of each choice
    whole_type = Completion
    chunk_type = Completion

    def opening(self) -> Choices:
        """Nothing: what precedes a choice is in its first chunk."""
        return []

    def chunks(self, piece: Piece) -> Choices:
        """One chunk a piece."""
        noteworthy = self.body.logprobs is not None or self.body.return_token_ids
        echoes = self.echoes is not None and piece.index not in self.begun
        if not (piece.text or piece.finish_reason or echoes or (piece.token_ids and noteworthy)):
            return []
        return [self.whole(piece)]

    def whole(self, piece: Piece) -> CompletionChoice:
        """A piece of a choice; the first one begins with the prompt, if it is to be echoed."""
        first = piece.index not in self.begun
        echo = self.echoes[piece.index // self.body.n] if first and self.echoes else ""
        if first:
            self.begun[piece.index] = self._text(len(echo))
        choice = CompletionChoice(
            index=piece.index,
            text=echo + piece.text,
            logprobs=self._logprobs(piece, echoes=first and bool(self.echoes)),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=ids_if(self.body.return_token_ids, piece.token_ids),
        )
        run = self.runs[piece.index]
        if first and self.body.return_token_ids:
            choice.prompt_token_ids = list(run.prompt)
        if self.body.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                run.prompt,
                run.prompt_logprobs,
                self._names,
                self.language.spelled_prompt(run.prompt),
                self.body.prompt_logprobs,
            )
        return choice

    def _logprobs(self, piece: Piece, *, echoes: bool) -> CompletionLogprobs | None:
        if self.body.logprobs is None or not (piece.token_ids or echoes):
            return None
        text = self.begun[piece.index]
        told = completion_logprobs(piece.token_ids, piece.logprobs, self._names, text)
        if not echoes:
            return told
        run = self.runs[piece.index]
        before = echoed_logprobs(
            run.prompt,
            run.prompt_logprobs,
            self._names,
            self._echoed(piece.index),
            self.body.logprobs,
        )
        return CompletionLogprobs(
            before.text_offset + told.text_offset,
            before.token_logprobs + told.token_logprobs,
            before.tokens + told.tokens,
            before.top_logprobs + told.top_logprobs,
        )

    @property
    def _names(self) -> TokenNames:
        as_ids = self.body.return_tokens_as_token_ids
        return TokenNames(self.language.spelling, "bytes:", as_ids)

    def _echoed(self, index: int) -> SpelledPrompt:
        number = index // self.body.n
        framed = isinstance(self.body.prompt[number], str) and self.body.add_special_tokens
        echo = self.echoes[number] if self.echoes else None
        return self.language.spelled_prompt(self.runs[index].prompt, echo, framed=framed)

    def _text(self, offset: int) -> SpelledText:
        decoder = self.language.decoder(skip_special_tokens=self.body.skip_special_tokens)
        return SpelledText(self.language.spelling, decoder, offset)
