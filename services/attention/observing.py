"""What the main loop knows of the engine, which has a thread of its own."""

import asyncio

from moesaic.cluster.admin import ServiceStatus
from moesaic.engine.engine import Engine
from moesaic.engine.thread import EngineThread
from moesaic.engine.vitals import Vitals
from services.attention.admin import AttentionAdmin

OBSERVE_EVERY_S = 0.25


async def observe(
    service: AttentionAdmin, status: ServiceStatus, thread: EngineThread, engine: Engine
) -> None:
    """Bring what the engine knows to the main loop, where operators ask for it, and tell whoever waits
    for answers that it lives: it has no time to say so itself during a long step."""

    async def look() -> None:
        service.load = engine.load()

    vitals = Vitals()
    while True:
        looking = asyncio.ensure_future(thread.run(look()))
        try:
            while not (await asyncio.wait({looking}, timeout=OBSERVE_EVERY_S))[0]:
                if vitals.live(engine.layers_done):  # it computes, and looks at nothing else
                    service.beat()
        finally:
            looking.cancel()
        looking.result()
        vitals.idle()
        service.beat()
        status.epoch = service.load.epoch
        status.waiting_for = list(service.load.waiting_for)
        await asyncio.sleep(OBSERVE_EVERY_S)
