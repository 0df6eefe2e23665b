"""``/v1/batches``: many requests that nobody waits for."""

import time
from collections.abc import Iterable
from typing import Annotated, Literal, get_type_hints

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.routing import BaseRoute

from moesaic.batch.state import WINDOW_S, Batch
from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import BodyPart, InferenceWire, Metadata
from moesaic.services.gateway.files.disk import NoSuch, new_id, on_disk
from moesaic.services.gateway.files.shelf import BatchRecord
from moesaic.services.gateway.gateway import record_of, shelf_of, store_of
from moesaic.services.gateway.http.openapi import answers
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.routes.files import ABSENT, ERRORS, LONGEST_S, SHORTEST_S
from moesaic.services.gateway.routes.json_route import JsonRoute
from moesaic.services.gateway.routes.pages import Page, page_of

router = APIRouter(route_class=JsonRoute)


class ExpiryWire(BodyPart):
    """Time for which the outputs are kept."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=SHORTEST_S, le=LONGEST_S)


class BatchWire(BodyPart):
    """A new batch."""

    input_file_id: str = Field(max_length=100, description="an uploaded file of requests")
    endpoint: str = Field(max_length=100, description="the route of all its requests")
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiryWire | None = None


def endpoints(routes: Iterable[BaseRoute]) -> list[str]:
    """List the routes that requests of a batch can be for: all that infer."""
    return sorted(
        route.path
        for route in routes
        if isinstance(route, APIRoute)
        and any(
            isinstance(hint, type) and issubclass(hint, InferenceWire)
            for hint in get_type_hints(route.endpoint).values()
        )
    )


@router.post("/v1/batches", responses=answers(Batch, errors=(*ERRORS, 429)))
async def create_batch(body: BatchWire, request: Request) -> Response:
    """Have the requests of a file answered, after everybody who waits."""
    store, shelf, asked = store_of(request), shelf_of(request), record_of(request)
    known = request.app.state.batch_endpoints
    if body.endpoint not in known:
        raise InvalidInput("endpoint", f"must be one of {', '.join(known)}")
    now = int(time.time())
    batch = Batch(
        id=new_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + WINDOW_S[body.completion_window],
        metadata=body.metadata,
    )
    expiry = body.output_expires_after
    record = BatchRecord(batch=batch, output_expires_s=expiry.seconds if expiry else None)

    def add() -> None:
        if shelf.file(body.input_file_id).purpose != "batch":
            raise InvalidInput("input_file_id", 'must be a file with the purpose "batch"')
        shelf.check_room(more_bytes=1)
        store.add_batch(asked.tenant, record)

    try:
        await on_disk(add)
    except NoSuch as error:
        raise InvalidInput("input_file_id", str(error)) from error
    store.added.set()
    return reply(batch)


@router.get("/v1/batches", responses=answers(Page, errors=(400, *ABSENT)))
async def list_batches(
    request: Request,
    after: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """The batches there are, the latest first."""
    shelf = shelf_of(request)
    return reply(await on_disk(lambda: page_of(shelf.batch_ids(), shelf.batch, after, limit)))


@router.get("/v1/batches/{batch_id}", responses=answers(Batch, errors=ABSENT))
async def get_batch(batch_id: str, request: Request) -> Response:
    """Read the progress of a batch."""
    shelf = shelf_of(request)
    return reply(await on_disk(lambda: shelf.batch(batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", responses=answers(Batch, errors=(400, *ABSENT)))
async def cancel_batch(batch_id: str, request: Request) -> Response:
    """Answer no more of a batch's requests; what is answered by then is kept."""
    store, shelf = store_of(request), shelf_of(request)
    batch = await on_disk(lambda: shelf.ask_cancel(batch_id))
    store.added.set()
    return reply(batch)
