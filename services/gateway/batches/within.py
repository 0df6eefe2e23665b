"""Requests to the gateway's own routes from within, with the answers that a client would get."""

import asyncio
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message

from moesaic.services.gateway.access import BATCH_PRIORITY, Tenant

HANG_UP_S = 2.0  # for a route to notice that nobody waits for it


class InnerAnswer(NamedTuple):
    """One complete answer."""

    status: int
    headers: Headers
    body: bytes


async def post_within(
    app: ASGIApp, tenant: Tenant, path: str, body: bytes, request_id: str
) -> InnerAnswer:
    """Post to a route as a tenant, without a connection and without a key. To cancel it is to disconnect.

    Args:
        app: the whole application, its outermost layer included.
        tenant: the owner of the request.
        path: of the route.
        body: JSON.
        request_id: its id in the log.
    """
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
        ],
        "client": None,
        "server": None,
        "state": {"caller": tenant},
    }
    to_read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    answer: list[Message] = []
    hung_up = asyncio.Event()

    async def receive() -> Message:
        if to_read:
            return to_read.pop()
        await hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        answer.append(message)

    running = asyncio.ensure_future(app(scope, receive, send))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        # The route ends its work, and the log says why.
        hung_up.set()
        await asyncio.wait({running}, timeout=HANG_UP_S)
        raise
    finally:
        running.cancel()
    content = b"".join(message.get("body", b"") for message in answer[1:])
    return InnerAnswer(answer[0]["status"], Headers(raw=answer[0]["headers"]), content)


_NULL = msgspec.Raw(b"null")
_LONGEST_NUMBER = 32  # what is longer is none that a route takes


class _Extension(msgspec.Struct):
    priority: msgspec.Raw = _NULL


class _Wanted(msgspec.Struct):
    """Fields of a body that say its priority; nothing else of it is decoded."""

    priority: msgspec.Raw = _NULL
    moesaic: msgspec.Raw = _NULL


def _priority_of(body: bytes) -> Any:
    try:
        wanted = msgspec.json.decode(body, type=_Wanted)
        told = wanted.priority
        if bytes(told) == b"null" and bytes(wanted.moesaic).startswith(b"{"):
            told = msgspec.json.decode(wanted.moesaic, type=_Extension).priority
        return msgspec.json.decode(told) if len(told) <= _LONGEST_NUMBER else bytes(told)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # No text, or no number: the route says so.
        return None


def after_others(body: bytes) -> bytes:
    """Give a body a priority that lets interactive requests go first; a later one of its own stays.

    Nothing else of the body changes: the last of two fields with the same name counts.

    Args:
        body: a JSON object, without space around it.

    Raises:
        RecursionError: it is nested too deeply.
    """
    own = _priority_of(body)
    if own is None:
        own = BATCH_PRIORITY
    if type(own) is not int:
        # The route says what is wrong with it.
        return body
    fields = body[:-1].rstrip()
    comma = b"" if fields == b"{" else b","
    return b'%s%s"priority":%d}' % (fields, comma, max(own, BATCH_PRIORITY))
