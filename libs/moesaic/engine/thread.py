"""A second event loop, which owns torch and UCXX, beside the main loop, which must always answer."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

import torch

from moesaic.transport.rings.plane import new_event_loop

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """Runs coroutines and plain calls on the engine loop, from the main loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` on the engine loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def build(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await the result of ``function``, called on the engine loop."""

        async def built() -> T:
            return function(*args, **kwargs)

        return await self.run(built())

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call ``function`` on the engine loop, soon; calls keep their order."""
        self._loop.call_soon_threadsafe(function, *arguments)


@asynccontextmanager
async def engine_thread(device: torch.device, name: str = "engine") -> AsyncIterator[EngineThread]:
    """Start the thread with an idle loop; leaving cancels what still runs there and stops it.

    Kernels that name no device run on ``device``.
    """
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def idle() -> None:
        stop = asyncio.Event()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        started.set_result((asyncio.get_running_loop(), stop))
        # Of this thread, so of all that runs on its loop.
        with torch.inference_mode():
            await stop.wait()

    def run() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(idle())

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    loop, stop = await asyncio.wrap_future(started)
    try:
        yield EngineThread(loop)
    finally:
        loop.call_soon_threadsafe(stop.set)
        await asyncio.to_thread(thread.join)
