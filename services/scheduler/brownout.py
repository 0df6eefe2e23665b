"""The decisions of workers under the policy of brownout."""

import asyncio
from contextlib import aclosing

import msgspec

from moesaic.cluster.brownout_view import DECISIONS
from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.messages.brownout import BrownoutDecision
from moesaic.services.scheduler.log import DecisionLog

_LOOK_S = 1.0
_decisions = msgspec.msgpack.Decoder(BrownoutDecision)


class BrownoutFeed:
    """Takes the decisions of workers into the log of decisions, while its scheduler leads."""

    def __init__(self, bus: Bus, leadership: Leadership, decisions: DecisionLog) -> None:
        self._bus, self._leadership, self._log = bus, leadership, decisions

    async def run(self) -> None:
        """Take in every decision while this scheduler leads, for ever.

        A new leader begins with those of the last hour, which Redis has.
        """
        while True:
            if self._leadership.held:
                await self._log.refresh()  # not to log again what the leader before has logged
                read = self._bus.read_on(DECISIONS, _decisions)
                async with aclosing(read) as decisions:
                    async for decision in decisions:
                        if decision is not None:
                            await self._log.note_brownout(decision)
                        if not self._leadership.held:
                            break
            await asyncio.sleep(_LOOK_S)
