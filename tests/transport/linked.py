"""Two networks of a kind and a link between them, and deadlines that pass when a test says so."""

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

from moesaic.transport.contract import Handler, Link, Network
from moesaic.transport.frame import Frame

HANG_S = 60.0  # names a hang; no wait here takes a hundredth of it on an idle machine


async def linked(cluster: Any, handler: Handler) -> tuple[Network, Link]:
    """A network, and its link to another one that answers by ``handler``."""
    near, far = cluster.network("near"), cluster.network("far")
    address = await far.listen("127.0.0.1", 0, handler)
    return near, await near.connect(address, "far", HANG_S)


async def never(request: Frame) -> NoReturn:
    """Answer nothing, until the peer is gone."""
    await asyncio.Event().wait()
    raise AssertionError


class Deadlines:
    """Lets deadlines of ``SECONDS`` on the running event loop pass when ``expire`` is called, whatever the time."""

    SECONDS = 86_400.0

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._call_later, self._due = loop.call_later, list[Callable[[], object]]()
        loop.call_later = self._note  # type: ignore[method-assign]

    def expire(self) -> None:
        """Let the time pass."""
        for call in self._due:
            call()

    def _note(
        self, delay: float, call: Any, *arguments: Any, **context: Any
    ) -> asyncio.TimerHandle:
        if delay == self.SECONDS:
            self._due.append(lambda: call(*arguments))
        return self._call_later(delay, call, *arguments, **context)
