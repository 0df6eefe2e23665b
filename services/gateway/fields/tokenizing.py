"""Bodies of ``/tokenize`` and ``/detokenize``."""

from typing import Annotated, Any

from pydantic import Field

from moesaic.services.gateway.fields.bodies import RequestBody, TokenId
from moesaic.services.gateway.fields.messages import Message, Tools


class TokenizeWire(RequestBody):
    """Body of ``/tokenize``: a prompt or messages."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = Field(
        None, description="true: end with the last message's text"
    )
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class DetokenizeWire(RequestBody):
    """Body of ``/detokenize``."""

    tokens: list[TokenId]
