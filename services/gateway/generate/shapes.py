"""Choices of ``/v1/chat/completions`` and ``/v1/completions``, whole and in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from moesaic.models.text.dialects.reader import Part
from moesaic.models.text.spelling import SpelledPrompt, SpelledText
from moesaic.services.gateway.fields.generating import ChatWire, CompletionWire
from moesaic.services.gateway.generate.answers import Piece
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
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    ToolCall,
    ToolCallDelta,
)
from moesaic.services.gateway.replies.logprobs import (
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from moesaic.services.gateway.workers.run import Run


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
        # Clients begin a text where content is, even an empty one. A turn may begin with a call or with reasoning.
        delta = Delta(role="assistant", content="" if self.speech.is_plain else None)
        return [ChatChunkChoice(index=i, delta=delta) for i in range(self.body.n)]

    def chunks(self, piece: Piece) -> Choices:
        """A chunk for each part, the finish reason with an empty delta."""
        deltas = [self._delta(piece.index, part) for part in self.parts(piece)]
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
            message=self._message(self.parts(piece)),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=ids_if(self.body.return_token_ids, piece.token_ids),
        )

    def parts(self, piece: Piece) -> list[Part]:
        """Take a piece apart: the text of each kind that the caller wants, and calls."""
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
            call = ToolCallDelta(index, self.id_of(part), "function", function)
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
                calls.append(ToolCall(self.id_of(part), CalledFunctionReply(part.text)))
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

    def id_of(self, part: Part) -> str:
        """Give a call its id: the model's own, or a new one."""
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
        is_text = isinstance(self.body.prompt[number], str)
        is_whole = self.body.truncate_prompt_tokens is None
        framed = is_text and is_whole and self.body.add_special_tokens
        echo = self.echoes[number] if self.echoes else None
        return self.language.spelled_prompt(self.runs[index].prompt, echo, framed=framed)

    def _text(self, offset: int) -> SpelledText:
        decoder = self.language.decoder(skip_special_tokens=self.body.skip_special_tokens)
        return SpelledText(self.language.spelling, decoder, offset)
