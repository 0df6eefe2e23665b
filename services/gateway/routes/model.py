"""The served model: its name, its tokenizer, texts as tokens and back."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

import moesaic
from moesaic.errors import InvalidInput, ModelNotFound
from moesaic.services.gateway.fields.bodies import with_template
from moesaic.services.gateway.fields.messages import turns_of
from moesaic.services.gateway.fields.tokenizing import DetokenizeWire, TokenizeWire
from moesaic.services.gateway.gateway import Gateway, gateway_of, record_of
from moesaic.services.gateway.http.openapi import READS_BODY, answers
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.language import SHORT_CHARS
from moesaic.services.gateway.routes.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute)


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moesaic"
    root: str
    parent: None = None
    max_model_len: int  # of prompt and answer together, on the workers there are


class ModelList(msgspec.Struct, kw_only=True):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(msgspec.Struct):
    """Token ids of a text, and each of them as text if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """The text of token ids."""

    prompt: str


@router.get("/v1/models", responses=answers(ModelList))
async def list_models(request: Request) -> Response:
    """The served model."""
    return reply(ModelList(data=[_card(gateway_of(request))]))


@router.get("/v1/models/{model_id:path}", responses=answers(ModelCard, errors=(404,)))
async def retrieve_model(model_id: str, request: Request) -> Response:
    """The served model, by name."""
    gateway = gateway_of(request)
    if model_id != gateway.model_name:
        raise ModelNotFound(model_id[:200], gateway.model_name)
    return reply(_card(gateway))


@router.post("/tokenize", responses=answers(Tokenized, errors=(*READS_BODY, 404)))
async def tokenize(body: TokenizeWire, request: Request) -> Response:
    """Token ids of a prompt or of messages."""
    gateway, record = gateway_of(request), record_of(request)
    gateway.check(record, body)
    language, size = gateway.language, record.num_bytes
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("prompt", "send either prompt or messages")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await language.list_tokens(body.prompt, add_special_tokens=special)
    else:
        words = language.template_words
        prompt = await language.encode_chat(
            await language.work(size, turns_of, body.messages or [], words),
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=body.chat_template_kwargs or {},
            control_tokens=gateway.settings.control_tokens_in_content,
            tools=[tool.for_template() for tool in body.tools or []],
            most=language.max_listed,
            size=size,
            continues=body.continue_final_message is True,
        )
        record.ignored = with_template(record.ignored, prompt.ignored, words)
        tokens = prompt.token_ids

    def answer() -> Response:
        strings = None
        if body.return_token_strs:
            framed = body.prompt is not None and body.add_special_tokens is not False
            spelled = language.spelled_prompt(tokens, body.prompt, framed=framed)
            firsts = (spelled.place(token_id).first for token_id in tokens)
            pieces = map(language.spelling.of, tokens, firsts)
            strings = [piece.decode(errors="replace") for piece in pieces]
        return reply(Tokenized(len(tokens), gateway.max_tokens, tokens, strings))

    return await language.work(len(tokens), answer)


@router.post("/detokenize", responses=answers(Detokenized, errors=(*READS_BODY, 404)))
async def detokenize(body: DetokenizeWire, request: Request) -> Response:
    """The text of token ids."""
    gateway = gateway_of(request)
    gateway.check(record_of(request), body)
    language = gateway.language
    long = len(body.tokens) > SHORT_CHARS
    decode = language.tokenizer.decode_long if long else language.tokenizer.decode

    def answer() -> Response:
        language.checked(body.tokens, "tokens")
        return reply(Detokenized(decode(body.tokens, skip_special_tokens=False)))

    return await language.work(len(body.tokens), answer)


@router.get("/tokenizer_info", responses=answers(dict[str, Any]))
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's configuration: with it, clients count tokens and render chats as the server does."""
    return reply(gateway_of(request).language.tokenizer_info)


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this software."""
    return {"version": moesaic.__version__}


def _card(gateway: Gateway) -> ModelCard:
    return ModelCard(
        id=gateway.model_name,
        created=gateway.created,
        root=gateway.model_name,
        max_model_len=gateway.max_tokens,
    )
