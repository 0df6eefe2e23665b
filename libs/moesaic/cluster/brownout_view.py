"""The policy of brownout, as every process sees it; without Redis, the last known one holds."""

from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec

from moesaic.cluster.redis.bus import Bus
from moesaic.errors import PeerLost
from moesaic.messages.brownout import BrownoutHint, BrownoutPolicy

STREAM = "ctl:brownout"  # hints that the policy has changed
POLICY = "brownout:policy"
DECISIONS = "ctl:latency"  # decisions of workers, with the latencies that they were made from

policies = msgspec.msgpack.Decoder(BrownoutPolicy)
_hints = msgspec.msgpack.Decoder(BrownoutHint)


async def watch_brownout(bus: Bus) -> AsyncGenerator[BrownoutPolicy, None]:
    """Give the policy, and each one after it; the iterator never ends."""
    known: BrownoutPolicy | None = None
    async for _ in bus.watch(STREAM, _hints):
        with suppress(PeerLost):
            found = await bus.get(POLICY, policies)
            if found is None or found == known:
                continue
            known = found
            yield found
