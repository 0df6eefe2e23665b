"""``/v1/chat/completions``."""

from fastapi import APIRouter, Request, Response

from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.gateway import admit
from moesaic.services.gateway.generate.conversation import begin_chat
from moesaic.services.gateway.generate.deliver import Delivery
from moesaic.services.gateway.http.openapi import INFERENCE, answers
from moesaic.services.gateway.replies.generating import (
    ChatCompletion,
    ChatCompletionChunk,
    PromptLogprobs,
)
from moesaic.services.gateway.replies.logprobs import prompt_logprobs
from moesaic.services.gateway.routes.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, stream=ChatCompletionChunk, errors=INFERENCE),
)
async def create_chat_completion(body: ChatWire, request: Request) -> Response:
    """Answer a conversation."""
    admitted = admit(request, body, "chatcmpl")
    chat = await begin_chat(admitted)
    prompt, growing, shape = chat.prompt, chat.answers, chat.shape

    def of_prompt() -> PromptLogprobs:
        told, num_top = growing.runs[0].prompt_logprobs, body.prompt_logprobs or 0
        text = admitted.gateway.language.spelled_prompt(prompt)
        return prompt_logprobs(prompt, told, shape.names, text, num_top)

    delivery = Delivery(
        admitted,
        growing,
        shape,
        prompt_token_ids=prompt if body.return_token_ids else None,
        prompt_logprobs=of_prompt if body.prompt_logprobs is not None else None,
    )
    return await delivery.respond(request)
