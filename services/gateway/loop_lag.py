"""Lag of the event loop: everything that the gateway does waits for it, probes too."""

import asyncio

from moesaic.services.gateway import metrics

LOOK_EVERY_S = 0.05


async def watch_loop() -> None:
    """Measure the excess of short sleeps, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOK_EVERY_S
        await asyncio.sleep(LOOK_EVERY_S)
        metrics.loop_lag_s.observe(max(0.0, loop.time() - due))
