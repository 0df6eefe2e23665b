"""``/v1/completions``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response

from moesaic.errors import InvalidInput
from services.gateway.bad_words import bad_words_of
from services.gateway.choices import Piece
from services.gateway.deliver import Choices, Delivery, answer_id, ids_if, token_texts
from services.gateway.execution import Run
from services.gateway.fields import CompletionWire
from services.gateway.gateway import Gateway, exchange_of, gateway_of, terms_of
from services.gateway.generation import Answers, Limits, runs_of
from services.gateway.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from services.gateway.openapi import INFERENCE, answers
from services.gateway.replies import Completion, CompletionChoice, CompletionLogprobs

DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post("/v1/completions", responses=answers(Completion, stream=Completion, errors=INFERENCE))
async def create_completion(body: CompletionWire, request: Request) -> Response:
    """Continue one or more prompts."""
    gateway, exchange = gateway_of(request), exchange_of(request)
    gateway.check(exchange, body)
    gateway.admit(exchange)
    deadline = gateway.deadline(request, body)
    num_chars = sum(len(prompt) for prompt in body.prompt)
    prompts = await gateway.language.work(num_chars, _encode, gateway, body)
    limits = Limits(
        gateway.max_tokens,
        body.answer_tokens,
        DEFAULT_MAX_TOKENS,
        body.answer_tokens_field,
    )
    wanted = body.logprobs, _prompt_logprobs(body)
    terms = terms_of(body, exchange.tenant)
    bad_words = await bad_words_of(gateway.language, body.bad_words)
    runs = runs_of(body, prompts, limits, "prompt", *wanted, terms, bad_words)
    growing = Answers(gateway, exchange, body, runs)
    exchange.take_tokens(limits.bound * len(runs))
    echoes = None
    if body.echo:
        echoes = await gateway.language.work(num_chars, _echoes, gateway, body, prompts)
    shape = _CompletionShape(body, runs, echoes, token_texts(gateway, body))
    delivery = Delivery(gateway, body, growing, shape, answer_id("cmpl"), deadline)
    return await delivery.respond(request)


def _prompt_logprobs(body: CompletionWire) -> int | None:
    """How many log-probabilities of each of the prompt's tokens the answer needs."""
    wanted = [count for count in (body.prompt_logprobs,) if count is not None]
    if body.echo and body.logprobs is not None:
        wanted.append(body.logprobs)
    if body.answer_tokens == 0:
        wanted.append(0)  # workers take such work only for the prompt's sake
    return max(wanted, default=None)


def _encode(gateway: Gateway, body: CompletionWire) -> list[list[int]]:
    language, special = gateway.language, body.add_special_tokens
    prompts = []
    for i, prompt in enumerate(body.prompt):
        if isinstance(prompt, str):
            field = "prompt" if len(body.prompt) == 1 else f"prompt[{i}]"
            prompts.append(language.encode_prompt(prompt, field, add_special_tokens=special))
        elif all(0 <= token_id < language.config.vocab_size for token_id in prompt):
            prompts.append(prompt)
        else:
            fix = f"token ids must be in 0..{language.config.vocab_size - 1}"
            raise InvalidInput("prompt", fix)
    return prompts


def _echoes(gateway: Gateway, body: CompletionWire, prompts: list[list[int]]) -> list[str]:
    decode = gateway.language.tokenizer.decode
    return [
        given
        if isinstance(given, str)
        else decode(ids, skip_special_tokens=body.skip_special_tokens)
        for given, ids in zip(body.prompt, prompts, strict=True)
    ]


@dataclass(frozen=True)
class _CompletionShape:
    body: CompletionWire
    runs: Sequence[Run]
    echoes: list[str] | None
    text_of: Callable[[int], str]
    begun: dict[int, int] = field(default_factory=dict)  # of each choice, where the next token is
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
        self.begun.setdefault(piece.index, len(echo))
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
                run.prompt, run.prompt_logprobs, self.text_of, self.body.prompt_logprobs
            )
        return choice

    def _logprobs(self, piece: Piece, *, echoes: bool) -> CompletionLogprobs | None:
        if self.body.logprobs is None or not (piece.token_ids or echoes):
            return None
        offset = self.begun[piece.index]
        told = completion_logprobs(piece.token_ids, piece.logprobs, self.text_of, offset)
        # By the tokens' own texts, so that offsets do not depend on how an answer was cut into pieces.
        self.begun[piece.index] += sum(map(len, told.tokens))
        if not echoes:
            return told
        run = self.runs[piece.index]
        num_top = self.body.logprobs
        before = echoed_logprobs(run.prompt, run.prompt_logprobs, self.text_of, num_top)
        return CompletionLogprobs(
            before.text_offset + told.text_offset,
            before.token_logprobs + told.token_logprobs,
            before.tokens + told.tokens,
            before.top_logprobs + told.top_logprobs,
        )
