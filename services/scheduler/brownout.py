"""The decisions of workers under the policy of brownout."""

import msgspec

from moesaic.cluster.brownout_view import DECISIONS
from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.messages.brownout import BrownoutDecision
from moesaic.services.scheduler.following import follow_while_leading
from moesaic.services.scheduler.log import DecisionLog

_decisions = msgspec.msgpack.Decoder(BrownoutDecision)


class BrownoutFeed:
    """Takes the decisions of workers into the log of decisions, while its scheduler leads."""

    def __init__(self, bus: Bus, leadership: Leadership, decisions: DecisionLog) -> None:
        self._bus, self._leadership, self._log = bus, leadership, decisions

    async def run(self) -> None:
        """Take in every decision while this scheduler leads, for ever.

        A new leader begins with those of the last hour, which Redis has.
        """
        await follow_while_leading(
            self._bus,
            self._leadership,
            DECISIONS,
            _decisions,
            self._log.note_brownout,
            begin=self._log.refresh,  # not to log again what the leader before has logged
        )
