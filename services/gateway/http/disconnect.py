"""Noticing that the client has gone, while an answer is being made."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from moesaic.errors import MoesaicError
from moesaic.services.gateway.http.request_record import CLIENT_CLOSED

T = TypeVar("T")

LOOK_AFTER_S = 0.02  # to look is a task of its own, and many an answer is out by then


class ClientClosed(MoesaicError):
    """The client closed the connection before the end of the answer."""

    code = "client_closed_request"
    http_status = CLIENT_CLOSED

    def __init__(self) -> None:
        super().__init__("the client closed the connection")


async def gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], ended: Callable[[], bool] = lambda: False
) -> T:
    """Do the work unless the client disconnects first, which cancels it; a disconnect once it has ``ended`` does not.

    Raises:
        ClientClosed: the client disconnected.
    """
    loop, worker = asyncio.get_running_loop(), asyncio.current_task()
    assert worker is not None  # a coroutine always runs in a task
    leaving: asyncio.Task[None] | None = None
    left = over = False

    def watch() -> None:
        nonlocal leaving
        leaving = loop.create_task(gone(receive))
        leaving.add_done_callback(stop)

    def stop(leaving: "asyncio.Task[None]") -> None:
        nonlocal left
        if not (over or leaving.cancelled() or ended()):
            left = True
            worker.cancel()

    looking = loop.call_later(LOOK_AFTER_S, watch)
    try:
        return await work
    except asyncio.CancelledError:
        if left and worker.uncancel() == 0:
            raise ClientClosed from (leaving.exception() if leaving is not None else None)
        raise  # somebody else wants this task to end
    finally:
        over = True  # it may have been seen in the same round of the loop
        looking.cancel()
        if leaving is not None:
            leaving.cancel()
