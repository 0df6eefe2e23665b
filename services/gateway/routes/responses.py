"""``/v1/responses``: conversations in items, whose answers may be stored and continued."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

import msgspec
from fastapi import APIRouter, Query, Request, Response

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.fields.response_items import NewId
from moesaic.services.gateway.fields.response_tools import described_tool
from moesaic.services.gateway.fields.responses import (
    LOGPROBS,
    Names,
    ResponsesWire,
    TextWire,
    chat_of,
)
from moesaic.services.gateway.files.disk import new_id, on_disk
from moesaic.services.gateway.files.responses import ConversationTooLarge, StoredResponse
from moesaic.services.gateway.files.shelf import QuotaExceeded
from moesaic.services.gateway.gateway import Admitted, admit, shelf_of
from moesaic.services.gateway.generate.conversation import begin_chat
from moesaic.services.gateway.generate.recall import Item, conversation_of, recall
from moesaic.services.gateway.generate.respond import Keep, ResponseDelivery
from moesaic.services.gateway.generate.transcript import Transcript
from moesaic.services.gateway.http.openapi import INFERENCE, answers
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.replies import responses as replies
from moesaic.services.gateway.routes.files import ABSENT, Deleted
from moesaic.services.gateway.routes.json_route import JsonRoute
from moesaic.services.gateway.routes.pages import Page

router = APIRouter(route_class=JsonRoute)

MAX_LISTED = 100


@router.post(
    "/v1/responses",
    responses=answers(replies.Response, stream=replies.ResponseEvent, named=True, errors=INFERENCE),
)
async def create_response(body: ResponsesWire, request: Request) -> Response:
    """Answer a conversation, which may go on from a stored response."""
    admitted = admit(request, body, "resp", body.objection())
    record, language = admitted.record, admitted.gateway.language
    shelf = None if admitted.gateway.store is None else shelf_of(request)
    recalled = await recall(body, shelf, admitted.gateway.settings.max_body_bytes)
    record.num_bytes += recalled.num_bytes
    response_id = new_id("resp_")
    ids = NewId(response_id)
    messages, items = await language.work(record.num_bytes, conversation_of, body, recalled, ids)
    is_kept = await _has_place(admitted, items)
    names = Names(messages.places, body.offered.places)
    with names.told():
        chat = await language.work(record.num_bytes, chat_of, body, messages)
        asked: Admitted[ChatWire] = replace(cast("Any", admitted), body=chat, answer_id=response_id)
        conversation = await begin_chat(asked)
        record.ignored = [*map(names.here, record.ignored), *_ignored(body, is_kept)]
        described = _described(admitted, response_id, is_kept)
        transcript = Transcript(described, ids, body.offered.origin)
        keep = _keeping(admitted, items) if is_kept else None
        delivery = ResponseDelivery(asked, conversation, transcript, names, keep)
        return await delivery.respond(request)


async def _has_place(admitted: Admitted[ResponsesWire], items: Sequence[Item]) -> bool:
    """Find out if the response to these items is to be kept.

    Raises:
        QuotaExceeded, ConversationTooLarge: there is no room, and the caller wants it kept.
    """
    store, wanted = admitted.gateway.store, admitted.body.store
    tenant, most = admitted.record.tenant, admitted.gateway.settings.max_body_bytes
    if store is None or wanted is False:
        return False

    def check() -> None:
        store.check_response_room(tenant, len(msgspec.json.encode(items)), most)

    try:
        await on_disk(check)
    except (QuotaExceeded, ConversationTooLarge):
        if wanted:
            raise
        return False
    return True


def _keeping(admitted: Admitted[ResponsesWire], items: Sequence[Item]) -> Keep:
    store, tenant = admitted.gateway.store, admitted.record.tenant
    most = admitted.gateway.settings.max_body_bytes
    assert store is not None

    async def keep(response: replies.Response) -> None:
        def add() -> None:
            raw = msgspec.Raw(msgspec.json.encode(response))
            store.add_response(tenant, response.id, StoredResponse(raw, list(items)), most)

        try:
            await on_disk(add)
        except (QuotaExceeded, ConversationTooLarge):
            if admitted.body.store:
                raise
            # The answer is there, and nobody asked for more.
            response.store = False

    return keep


def _ignored(body: ResponsesWire, is_kept: bool) -> list[str]:
    """Name the fields that are known here, but change nothing."""
    others = set(body.include or ()) - {LOGPROBS}
    return [
        *(["store"] if body.store and not is_kept else []),
        *(["include"] if others else []),
        *body.offered.ignored,
    ]


def _described(
    admitted: Admitted[ResponsesWire], response_id: str, stored: bool
) -> replies.Response:
    """Describe a response before its answer comes."""
    body, defaults = admitted.body, admitted.gateway.defaults
    text = body.text or TextWire.model_validate({})
    form = text.format.model_dump(exclude_none=True, by_alias=True) if text.format else None
    given = [value for value in (body.temperature, defaults.temperature) if value is not None]
    shares = [value for value in (body.top_p, defaults.top_p) if value is not None]
    return replies.Response(
        id=response_id,
        created_at=admitted.created,
        model=admitted.gateway.model_name,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        store=stored,
        max_output_tokens=body.max_output_tokens,
        temperature=next(iter(given), 1.0),
        top_p=next(iter(shares), 1.0),
        top_logprobs=body.top_logprobs or 0,
        tools=[described_tool(tool) for tool in body.tools or ()],
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text={"format": form or {"type": "text"}}
        | ({"verbosity": text.verbosity} if text.verbosity else {}),
        reasoning={"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        metadata=body.metadata or {},
        user=body.user,
    )


@router.get(
    "/v1/responses/{response_id}", responses=answers(replies.Response, errors=(400, *ABSENT))
)
async def get_response(response_id: str, request: Request, stream: bool = False) -> Response:
    """Read a stored response."""
    shelf = shelf_of(request)
    if stream:
        fix = "stored responses are not streamed: leave it out"
        raise InvalidInput("stream", fix, code="unsupported_parameter")
    return reply((await on_disk(lambda: shelf.responses.read(response_id))).response)


@router.delete("/v1/responses/{response_id}", responses=answers(Deleted, errors=ABSENT))
async def delete_response(response_id: str, request: Request) -> Response:
    """Forget a stored response; later ones that went on from it keep its items."""
    shelf = shelf_of(request)
    await on_disk(lambda: shelf.responses.delete(response_id))
    return reply(Deleted(response_id, "response"))


@router.get(
    "/v1/responses/{response_id}/input_items", responses=answers(Page, errors=(400, *ABSENT))
)
async def list_input_items(
    response_id: str,
    request: Request,
    after: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The items that a stored response answered, those of the responses before it too."""
    shelf = shelf_of(request)
    items = (await on_disk(lambda: shelf.responses.read(response_id))).input
    if order == "desc":
        items = items[::-1]
    if after is not None:
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidInput("after", "must be the id of an item of this response")
        items = items[places[0] + 1 :]
    data = items[:limit]
    return reply(
        Page(
            data=data,
            first_id=data[0]["id"] if data else None,
            last_id=data[-1]["id"] if data else None,
            has_more=len(items) > limit,
        )
    )
