"""A view of the engine, which has a thread of its own, on the main loop."""

import asyncio

from moesaic.cluster.rpc.admin import ServiceStatus
from moesaic.engine.vitals import Vitals
from moesaic.services.attention.admin import AttentionAdmin
from moesaic.services.attention.engine import RunningEngine

OBSERVE_EVERY_S = 0.25


async def observe(api: AttentionAdmin, status: ServiceStatus, running: RunningEngine) -> None:
    """Keep the load that operators and gateways are shown, until cancelled.

    Gateways are told as well that the engine lives: it has no time to say so itself during a long step.
    """
    engine, vitals = running.engine, Vitals()

    async def look() -> None:
        api.load = engine.load()

    while True:
        looking = asyncio.ensure_future(running.thread.run(look()))
        try:
            while not (await asyncio.wait({looking}, timeout=OBSERVE_EVERY_S))[0]:
                if vitals.live(engine.layers_done):  # it computes, and looks at nothing else
                    api.beat()
        finally:
            looking.cancel()
        looking.result()
        vitals.idle()
        api.beat()
        status.epoch = max(status.epoch, api.load.epoch)
        status.waiting_for = list(api.load.waiting_for)
        await asyncio.sleep(OBSERVE_EVERY_S)
