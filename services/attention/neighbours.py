"""The attention workers on the same node: rows for experts on other nodes travel together."""

from contextlib import AsyncExitStack

from moesaic.addresses import is_everywhere
from moesaic.cluster.background import background
from moesaic.cluster.bus import Bus
from moesaic.cluster.registry import Fleet, watch_fleet
from moesaic.dispatch.exchange.adaptive import AdaptiveExchange
from moesaic.dispatch.exchange.contacts import Contact
from moesaic.dispatch.routed import RoutedDispatcher
from moesaic.engine.thread import EngineThread
from services.attention.settings import AttentionSettings


async def open_exchange(
    settings: AttentionSettings,
    model_digest: str,
    bus: Bus,
    thread: EngineThread,
    dispatcher: RoutedDispatcher,
    parts: AsyncExitStack,
) -> str:
    """Let ``dispatcher`` exchange as the settings say, together with the node's other workers.

    Returns the address at which this worker receives their rows; empty if it gathers none.
    """
    where = settings.data
    if settings.exchange == "direct" or settings.deterministic:
        return ""  # the latter: what is not summed up does not travel together
    if is_everywhere(where.advertised_host):
        return ""  # nobody could dial it

    async def listen() -> tuple[AdaptiveExchange, str]:
        exchange = AdaptiveExchange(
            dispatcher.network,
            settings.worker_id,
            settings.node_name,
            settings.exchange,
            settings.expert_timeout_s,
            dispatcher.route_of,
        )
        dispatcher.use(exchange)
        return exchange, await dispatcher.network.listen(
            where.host, settings.data_port, exchange.answer
        )

    exchange, bound = await thread.run(listen())
    fleet = await parts.enter_async_context(watch_fleet(bus))

    async def follow() -> None:
        while True:
            thread.call(exchange.set_neighbours, _neighbours(fleet, settings, model_digest))
            await fleet.changed()

    await parts.enter_async_context(background(follow(), "neighbours"))
    return where.advertised(bound)


def _neighbours(fleet: Fleet, settings: AttentionSettings, model_digest: str) -> list[Contact]:
    return [
        Contact(record.worker_id, record.generation, record.data_address)
        for record in fleet.workers.values()
        if record.role == "attention"
        and record.dispatch == "routed"
        and record.data_address
        and not record.share
        and record.node == settings.node_name
        and record.model_digest == model_digest
        and record.worker_id != settings.worker_id
    ]
