"""``/v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's API."""

from dataclasses import replace

from fastapi import APIRouter, Request, Response

from moesaic.services.gateway.fields.anthropic import CountTokensWire, MessagesWire
from moesaic.services.gateway.fields.bodies import few
from moesaic.services.gateway.gateway import admit, gateway_of, record_of
from moesaic.services.gateway.generate.anthropic_answer import GrowingContent, MessageDelivery
from moesaic.services.gateway.generate.anthropic_chat import chat_of
from moesaic.services.gateway.generate.conversation import begin_chat, encode_chat
from moesaic.services.gateway.http.anthropic_errors import AnthropicErrorReply, message_field
from moesaic.services.gateway.http.openapi import INFERENCE, READS_BODY, answers
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.http.request_record import RequestRecord
from moesaic.services.gateway.replies.anthropic import MessageEvent, MessageReply, TokenCount
from moesaic.services.gateway.routes.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/messages",
    responses=answers(
        MessageReply,
        stream=MessageEvent | AnthropicErrorReply,
        named=True,
        errors=(*INFERENCE, 529),
    ),
)
async def create_message(body: MessagesWire, request: Request) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    gateway, record = gateway_of(request), record_of(request)
    gateway.check(record, body)
    language = gateway.language
    chat, ignored = await language.work(record.num_bytes, chat_of, body, language)
    admitted = admit(request, chat, "msg")
    encoded = await encode_chat(gateway, record, chat)
    # Clients ask for as much as a model of Anthropic's may answer.
    room = gateway.max_tokens - len(encoded.prompt)
    fills_context = 0 < room < body.max_tokens
    if fills_context:
        admitted = replace(admitted, body=chat.model_copy(update={"max_tokens": room}))
    conversation = await begin_chat(admitted, encoded)
    _name_ignored(record, ignored)
    hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
    content = GrowingContent(conversation, hides_thinking)
    delivery = MessageDelivery(admitted, conversation, content, fills_context)
    return await delivery.respond(request)


@router.post("/v1/messages/count_tokens", responses=answers(TokenCount, errors=(*READS_BODY, 404)))
async def count_tokens(body: CountTokensWire, request: Request) -> Response:
    """Count the tokens of a conversation that is not answered."""
    gateway, record = gateway_of(request), record_of(request)
    gateway.check(record, body)
    language = gateway.language
    chat, ignored = await language.work(record.num_bytes, chat_of, body, language)
    encoded = await encode_chat(gateway, record, chat, language.max_listed)
    _name_ignored(record, ignored)
    return reply(TokenCount(len(encoded.prompt)))


def _name_ignored(record: RequestRecord, ignored: list[str]) -> None:
    """Name what has no effect for the answer's header, by the fields of a message."""
    effort = {"reasoning_effort": "output_config.effort"}
    names = [effort.get(name, message_field(name)) for name in record.ignored]
    record.ignored = few(sorted({*names, *ignored}))
