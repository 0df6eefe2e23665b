"""The form of rows on the wire, where it is to be chosen."""

import asyncio
from collections.abc import Callable

from moesaic.cluster.background import tended
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.two_phase.wire_choice import WireChooser
from moesaic.messages.wire import WireDtype
from moesaic.services.attention.modes.contract import WorkerParts

_LOOK_S = 1.0  # between two looks for new links


async def choose_wire(
    worker: WorkerParts, dispatcher: RoutedDispatcher, *others: Callable[[WireDtype], None]
) -> None:
    """Tell ``dispatcher`` and ``others`` the form until the worker ends, with ``--wire-dtype auto``."""
    if worker.settings.wire_dtype != "auto":
        return
    chooser = await worker.thread.build(
        WireChooser,
        worker.settings.node_name,
        worker.config.hidden_size,
        worker.decoder.dtype,
        lambda: dispatcher.route_of(dispatcher.epoch),
        (dispatcher.set_wire, *others),
        lambda: dispatcher.num_sent,
    )

    async def follow() -> None:
        while True:
            await worker.thread.run(chooser.look())
            await asyncio.sleep(_LOOK_S)

    await worker.process.enter(tended(follow, "wire"))
