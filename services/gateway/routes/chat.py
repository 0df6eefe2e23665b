"""``/v1/chat/completions``."""

from fastapi import APIRouter, Request, Response

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import with_template
from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.fields.messages import turns_of
from moesaic.services.gateway.gateway import admit
from moesaic.services.gateway.generate.answers import begin
from moesaic.services.gateway.generate.deliver import Delivery
from moesaic.services.gateway.generate.runs import LogprobCounts, kept_of
from moesaic.services.gateway.generate.shapes import ChatShape
from moesaic.services.gateway.generate.speech import (
    Speech,
    template_kwargs_of,
    tools_for_template,
    wanted_of,
)
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
    gateway = admitted.gateway
    language = gateway.language
    size = admitted.record.num_bytes
    wanted = await language.work(size, wanted_of, body, language)
    words = language.template_words
    template_kwargs, unplaced = template_kwargs_of(body, language)
    kept = kept_of(admitted)
    prompt, opened, unknown = await language.encode_chat(
        await language.work(size, turns_of, body.messages, words),
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=template_kwargs,
        control_tokens=gateway.settings.control_tokens_in_content,
        tools=await language.work(size, tools_for_template, body, wanted),
        most=None if kept is None else language.max_listed,
        size=size,
        continues=body.continue_final_message is True,
    )
    prompt = prompt[-(kept or 0) :]
    record = admitted.record
    record.ignored = with_template(record.ignored, [*unknown, *unplaced], words)
    logprobs = LogprobCounts(_top_logprobs(body), body.prompt_logprobs)
    speech = Speech(language.dialect, wanted, opened)
    growing = await begin(admitted, [prompt], "messages", logprobs, speech=speech)
    shape = ChatShape(body, language, speech)

    def of_prompt() -> PromptLogprobs:
        told, num_top = growing.runs[0].prompt_logprobs, body.prompt_logprobs or 0
        text = language.spelled_prompt(prompt)
        return prompt_logprobs(prompt, told, shape.names, text, num_top)

    delivery = Delivery(
        admitted,
        growing,
        shape,
        prompt_token_ids=prompt if body.return_token_ids else None,
        prompt_logprobs=of_prompt if body.prompt_logprobs is not None else None,
    )
    return await delivery.respond(request)


def _top_logprobs(body: ChatWire) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise InvalidInput("top_logprobs", "needs logprobs to be true")
    return (body.top_logprobs or 0) if body.logprobs else None
