"""Noticing that the client has gone, while an answer is being made."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from moesaic.errors import MoesaicError
from services.gateway.exchange import CLIENT_CLOSED

T = TypeVar("T")


class ClientClosed(MoesaicError):
    """Nobody waits for the answer any more."""

    code = "client_closed_request"
    http_status = CLIENT_CLOSED

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless the client disconnects first, which cancels it.

    Raises:
        ClientClosed: the client disconnected.
    """
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientClosed
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)
