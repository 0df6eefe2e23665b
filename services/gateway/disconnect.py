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
    worker = asyncio.current_task()
    assert worker is not None  # a coroutine always runs in a task
    left = False

    def stop(leaving: "asyncio.Task[None]") -> None:
        nonlocal left
        if not leaving.cancelled():
            left = True
            worker.cancel()

    leaving = asyncio.ensure_future(gone(receive))
    leaving.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if left and worker.uncancel() == 0:
            raise ClientClosed from leaving.exception()
        raise  # somebody else wants this task to end
    finally:
        leaving.cancel()
