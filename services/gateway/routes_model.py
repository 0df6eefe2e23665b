"""What there is to know of the served model: its name, its tokenizer, texts as tokens and back."""

from typing import Any

from fastapi import APIRouter, Request

import moesaic
from moesaic.errors import InvalidInput, ModelNotFound
from services.gateway.fields import DetokenizeWire, TokenizeWire
from services.gateway.gateway import Gateway, exchange_of, gateway_of
from services.gateway.problems import INVALID

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model."""
    return {"object": "list", "data": [_card(gateway_of(request))]}


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, request: Request) -> dict[str, Any]:
    """The served model, by name."""
    gateway = gateway_of(request)
    if model_id != gateway.model_name:
        raise ModelNotFound(model_id[:200], gateway.model_name)
    return _card(gateway)


@router.post("/tokenize", responses=INVALID)
async def tokenize(body: TokenizeWire, request: Request) -> dict[str, Any]:
    """Token ids of a prompt or of messages."""
    gateway = gateway_of(request)
    gateway.check(exchange_of(request), body)
    language = gateway.language
    if (body.prompt is None) == (body.messages is None):
        raise InvalidInput("prompt", "send either prompt or messages")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await language.encode(body.prompt, add_special_tokens=special)
    else:
        messages = [m.for_template(f"messages[{i}]") for i, m in enumerate(body.messages or [])]
        tokens = await language.encode_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=body.chat_template_kwargs or {},
        )
    strings = (
        [language.token_text(token_id) for token_id in tokens] if body.return_token_strs else None
    )
    return {
        "count": len(tokens),
        "max_model_len": language.max_tokens,
        "tokens": tokens,
        "token_strs": strings,
    }


@router.post("/detokenize", responses=INVALID)
async def detokenize(body: DetokenizeWire, request: Request) -> dict[str, Any]:
    """The text of token ids."""
    gateway = gateway_of(request)
    gateway.check(exchange_of(request), body)
    language = gateway.language
    if any(token_id >= language.config.vocab_size for token_id in body.tokens):
        raise InvalidInput("tokens", f"token ids must be in 0..{language.config.vocab_size - 1}")
    text = await language.work(
        len(body.tokens), language.tokenizer.decode, body.tokens, skip_special_tokens=False
    )
    return {"prompt": text}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """The tokenizer's configuration: with it, clients count tokens and render chats as the server does."""
    return gateway_of(request).language.tokenizer_info


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of this software."""
    return {"version": moesaic.__version__}


def _card(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.model_name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "moesaic",
        "root": gateway.model_name,
        "parent": None,
        "max_model_len": gateway.language.max_tokens,
    }
