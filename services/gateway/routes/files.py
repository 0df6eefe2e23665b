"""``/v1/files``: inputs and outputs of batches."""

import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from moesaic.errors import InvalidInput
from moesaic.services.gateway.files.disk import NoSuch, new_id, on_disk
from moesaic.services.gateway.files.shelf import StoredFile
from moesaic.services.gateway.files.upload import Uploaded, receive_upload
from moesaic.services.gateway.gateway import record_of, shelf_of
from moesaic.services.gateway.http.openapi import READS_BODY, answers
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.http.request_record import ClientClosed
from moesaic.services.gateway.routes.json_route import JsonRoute
from moesaic.services.gateway.routes.pages import Page, page_of

router = APIRouter(route_class=JsonRoute)

ABSENT = (404, 503)  # errors of every route that reads the store
ERRORS = (*READS_BODY, *ABSENT)
READ_BYTES = 256 << 10
MAX_LISTED = 10_000
SHORTEST_S, LONGEST_S = 3600, 30 * 86400  # that a caller may have a file kept
_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSON lines"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
    "required": ["file", "purpose"],
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


_CONTENT = answers(None, errors=ABSENT) | {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}


class Deleted(msgspec.Struct):
    """Note of a deleted file."""

    id: str
    object: str = "file"
    deleted: bool = True


@router.post("/v1/files", responses=answers(StoredFile, errors=ERRORS), openapi_extra=_UPLOAD)
async def upload_file(request: Request) -> Response:
    """Keep a file of requests for a batch."""
    shelf, file_id = shelf_of(request), new_id("file-")
    await on_disk(lambda: shelf.check_room(more_files=1))
    making = ExitStack()
    directory: Path = await on_disk(lambda: making.enter_context(shelf.new_file(file_id)))
    try:
        uploaded = await receive_upload(
            request.headers.get("content-type", ""),
            request.stream(),
            directory / "content",
            shelf,
        )
        file = _described(file_id, uploaded)
        await on_disk(lambda: shelf.finish_file(directory, file))
    except BaseException as error:
        end = type(error), error, error.__traceback__
        await on_disk(lambda: making.__exit__(*end))
        if isinstance(error, ClientDisconnect):
            raise ClientClosed from None
        raise
    await on_disk(making.close)
    return reply(file)


def _described(file_id: str, uploaded: Uploaded) -> StoredFile:
    if uploaded.fields.get("purpose") != "batch":
        raise InvalidInput("purpose", 'must be "batch"')
    now = int(time.time())
    keep_s = _seconds(uploaded.fields)
    return StoredFile(
        id=file_id,
        bytes=uploaded.num_bytes,
        created_at=now,
        expires_at=None if keep_s is None else now + keep_s,
        filename=uploaded.filename or "file.jsonl",
        purpose="batch",
    )


def _seconds(fields: dict[str, str]) -> int | None:
    """Read ``expires_after`` of a form, as clients send it."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidInput("expires_after[anchor]", 'must be "created_at"')
    if seconds is None or not seconds.isdecimal() or not SHORTEST_S <= int(seconds) <= LONGEST_S:
        raise InvalidInput("expires_after[seconds]", f"must be in {SHORTEST_S}..{LONGEST_S}")
    return int(seconds)


@router.get("/v1/files", responses=answers(Page, errors=(400, *ABSENT)))
async def list_files(
    request: Request,
    after: Annotated[str | None, Query(max_length=100)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=100)] = None,
) -> Response:
    """The files there are."""
    shelf = shelf_of(request)

    def listed() -> Any:
        return page_of(
            shelf.file_ids(),
            shelf.file,
            after,
            limit,
            ascending=order == "asc",
            wanted=lambda file: purpose in (None, file.purpose),
        )

    return reply(await on_disk(listed))


@router.get("/v1/files/{file_id}", responses=answers(StoredFile, errors=ABSENT))
async def get_file(file_id: str, request: Request) -> Response:
    """Read the description of a file."""
    shelf = shelf_of(request)
    return reply(await on_disk(lambda: shelf.file(file_id)))


@router.get("/v1/files/{file_id}/content", responses=_CONTENT)
async def get_file_content(file_id: str, request: Request) -> Response:
    """The file itself."""
    shelf = shelf_of(request)

    def opened() -> tuple[StoredFile, BinaryIO]:
        file = shelf.file(file_id)
        try:
            return file, shelf.content(file_id).open("rb")
        except FileNotFoundError:
            raise NoSuch("file", file_id) from None

    file, content = await on_disk(opened)
    wanted = record_of(request).method != "HEAD"
    return StreamingResponse(
        _pieces(content, wanted),
        headers={"content-length": str(file.bytes)},
        media_type="application/octet-stream",
    )


async def _pieces(content: BinaryIO, wanted: bool) -> AsyncIterator[bytes]:
    with content:
        while wanted and (piece := await on_disk(lambda: content.read(READ_BYTES))):
            yield piece


@router.delete("/v1/files/{file_id}", responses=answers(Deleted, errors=ABSENT))
async def delete_file(file_id: str, request: Request) -> Response:
    """Forget a file; batches made from it go on."""
    shelf = shelf_of(request)
    await on_disk(lambda: shelf.delete_file(file_id))
    return reply(Deleted(file_id))
