"""``/v1/completions``."""

from array import array

from fastapi import APIRouter, Request, Response

from moesaic.services.gateway.fields.generating import CompletionWire
from moesaic.services.gateway.gateway import admit
from moesaic.services.gateway.generate.answers import begin
from moesaic.services.gateway.generate.deliver import Delivery
from moesaic.services.gateway.generate.runs import LogprobCounts, kept_of
from moesaic.services.gateway.generate.shapes import CompletionShape
from moesaic.services.gateway.http.openapi import INFERENCE, answers
from moesaic.services.gateway.language import Language
from moesaic.services.gateway.replies.generating import Completion
from moesaic.services.gateway.routes.json_route import JsonRoute

DEFAULT_MAX_TOKENS = 16

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", responses=answers(Completion, stream=Completion, errors=INFERENCE))
async def create_completion(body: CompletionWire, request: Request) -> Response:
    """Continue one or more prompts."""
    admitted = admit(request, body, "cmpl")
    language = admitted.gateway.language
    num_chars = sum(len(prompt) for prompt in body.prompt)
    kept = kept_of(admitted, DEFAULT_MAX_TOKENS)
    prompts = await language.work(num_chars, _encode, language, body, kept)
    logprobs = LogprobCounts(body.logprobs, _prompt_logprobs(body))
    growing = await begin(admitted, prompts, "prompt", logprobs, DEFAULT_MAX_TOKENS)
    echoes = None
    if body.echo:
        echoes = await language.work(num_chars, _echoes, language, body, prompts)
    shape = CompletionShape(body, growing.runs, echoes, language)
    return await Delivery(admitted, growing, shape).respond(request)


def _prompt_logprobs(body: CompletionWire) -> int | None:
    """Count the log-probabilities of each of the prompt's tokens that the answer needs."""
    counts = [] if body.prompt_logprobs is None else [body.prompt_logprobs]
    if body.echo and body.logprobs is not None:
        counts.append(body.logprobs)
    if body.answer_tokens == 0:
        # Workers take such work only for the prompt's sake.
        counts.append(0)
    return max(counts, default=None)


def _encode(language: Language, body: CompletionWire, kept: int | None) -> "list[array[int]]":
    """Encode the prompts, and keep the last tokens of each.

    Millions of objects would take long to be freed, so the tokens are packed.
    """
    special, is_one = body.add_special_tokens, len(body.prompt) == 1
    most = None if kept is None else language.max_listed

    def encoded(given: str | list[int], field: str) -> list[int]:
        if isinstance(given, str):
            return language.encode_prompt(given, field, add_special_tokens=special, most=most)
        return language.checked(given, "prompt")

    return [
        array("I", encoded(prompt, "prompt" if is_one else f"prompt[{i}]")[-(kept or 0) :])
        for i, prompt in enumerate(body.prompt)
    ]


def _echoes(language: Language, body: CompletionWire, prompts: "list[array[int]]") -> list[str]:
    decode, skip = language.tokenizer.decode, body.skip_special_tokens
    # Of a text that was cut only its last tokens are the prompt.
    is_whole = body.truncate_prompt_tokens is None
    return [
        given
        if isinstance(given, str) and is_whole
        else decode(list(token_ids), skip_special_tokens=skip)
        for given, token_ids in zip(body.prompt, prompts, strict=True)
    ]
