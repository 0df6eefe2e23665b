"""``/v1/completions``."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response

from moesaic.errors import InvalidInput
from services.gateway.choices import Piece
from services.gateway.deliver import Choices, Delivery, answer_id, ids_if, token_texts
from services.gateway.fields import CompletionWire
from services.gateway.gateway import Gateway, exchange_of, gateway_of
from services.gateway.generation import Answers, Limits, runs_of
from services.gateway.logprobs import completion_logprobs
from services.gateway.problems import INVALID
from services.gateway.replies import CompletionChoice, CompletionLogprobs

DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post("/v1/completions", responses=INVALID)
async def create_completion(body: CompletionWire, request: Request) -> Response:
    """Continue one or more prompts."""
    gateway, exchange = gateway_of(request), exchange_of(request)
    gateway.check(exchange, body)
    if body.echo and body.logprobs is not None:
        fix = "together with logprobs is not supported yet"
        raise InvalidInput("echo", fix, code="unsupported_parameter")
    gateway.admit(exchange)
    deadline = gateway.deadline(request, body)
    prompts = await gateway.language.off_loop(_encode, gateway, body)
    limits = Limits(gateway.language.max_tokens, body.max_tokens, DEFAULT_MAX_TOKENS)
    runs = runs_of(body, prompts, limits, "prompt", body.logprobs)
    answers = Answers(gateway, exchange, body, runs)
    echoes = await gateway.language.off_loop(_echoes, gateway, body, prompts) if body.echo else None
    shape = _CompletionShape(body, prompts, echoes, token_texts(gateway, body))
    delivery = Delivery(gateway, body, answers, shape, answer_id("cmpl"), deadline)
    return await delivery.respond(request)


def _encode(gateway: Gateway, body: CompletionWire) -> list[list[int]]:
    tokenizer = gateway.language.tokenizer
    prompts = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            prompts.append(tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens))
        elif all(0 <= token_id < gateway.language.config.vocab_size for token_id in prompt):
            prompts.append(prompt)
        else:
            fix = f"token ids must be in 0..{gateway.language.config.vocab_size - 1}"
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
    prompts: list[list[int]]
    echoes: list[str] | None
    text_of: Callable[[int], str]
    begun: dict[int, int] = field(default_factory=dict)  # characters of each choice that were sent
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self) -> Choices:
        """With ``echo`` each choice begins with its prompt."""
        if self.echoes is None:
            return []
        total = len(self.prompts) * self.body.n
        return [CompletionChoice(index=i, text=self.echoes[i // self.body.n]) for i in range(total)]

    def chunks(self, piece: Piece) -> Choices:
        """One chunk a piece."""
        noteworthy = self.body.logprobs is not None or self.body.return_token_ids
        if not (piece.text or piece.finish_reason or (piece.token_ids and noteworthy)):
            return []
        return [self._choice(piece, "")]

    def whole(self, piece: Piece) -> CompletionChoice:
        """The prompt, if it is to be echoed, and the answer."""
        return self._choice(piece, self.echoes[piece.index // self.body.n] if self.echoes else "")

    def _choice(self, piece: Piece, echo: str) -> CompletionChoice:
        first = piece.index not in self.begun
        offset = self.begun.get(piece.index, 0)
        self.begun[piece.index] = offset + len(piece.text)
        choice = CompletionChoice(
            index=piece.index,
            text=echo + piece.text,
            logprobs=self._logprobs(piece, offset),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=ids_if(self.body.return_token_ids, piece.token_ids),
        )
        if self.body.return_token_ids and first:
            choice.prompt_token_ids = self.prompts[piece.index // self.body.n]
        return choice

    def _logprobs(self, piece: Piece, offset: int) -> CompletionLogprobs | None:
        if self.body.logprobs is None or not piece.token_ids:
            return None
        return completion_logprobs(piece.token_ids, piece.logprobs, self.text_of, offset)
