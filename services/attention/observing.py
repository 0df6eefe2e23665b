"""A view of the engine, which has a thread of its own, on the main loop."""

import asyncio
import time

from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.services.attention.admin import AttentionAdmin
from moesaic.services.attention.engine import RunningEngine

OBSERVE_EVERY_S = 0.25
STUCK_S = 20.0  # for one layer of a step


class Vitals:
    """Vital signs of an engine that says nothing: a count that grows as long as there is progress.

    A long step keeps the engine's event loop from answering, but its layers go by. If none has gone by
    for ``STUCK_S``, the engine counts as stuck, and those that wait for it may give up.
    """

    def __init__(self) -> None:
        self._count, self._grown_at = -1, 0.0

    def live(self, count: int, now_s: float | None = None) -> bool:
        """Return true if the engine lives, given the number of layers it has computed so far."""
        now_s = time.monotonic() if now_s is None else now_s
        if count != self._count:
            self._count, self._grown_at = count, now_s
        return now_s - self._grown_at < STUCK_S

    def idle(self) -> None:
        """Take note that the engine has answered: its next silence is a new one."""
        self._count = -1


async def observe(api: AttentionAdmin, status: ServiceStatus, running: RunningEngine) -> None:
    """Keep the load that operators and gateways are shown, until cancelled.

    Gateways are told as well that the engine lives: it has no time to say so itself during a long step.
    """
    engine, vitals = running.engine, Vitals()
    while True:
        looking = asyncio.ensure_future(running.thread.build(engine.load))
        try:
            while not (await asyncio.wait({looking}, timeout=OBSERVE_EVERY_S))[0]:
                # It computes, and looks at nothing else.
                if vitals.live(engine.layers_done):
                    api.beat()
        finally:
            looking.cancel()
        api.load = looking.result()
        vitals.idle()
        api.beat()
        status.epoch = max(status.epoch, api.load.epoch)
        status.waiting_for = list(api.load.waiting_for)
        await asyncio.sleep(OBSERVE_EVERY_S)
