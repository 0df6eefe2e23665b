"""Cost of messages over links, asked of the links themselves."""

import asyncio
import itertools
from collections.abc import Sequence

import msgspec

from moesaic.dispatch.two_phase.choice.costs import BURST, LinkCost, LinkSurvey
from moesaic.dispatch.two_phase.messages import Measure, encode
from moesaic.dispatch.two_phase.nodes import Nodes, Reach
from moesaic.errors import MoesaicError
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

_SMALL, _LARGE, _LARGER = 0, 1 << 16, 1 << 19  # bytes
_SMALL_PINGS, _LARGE_PINGS = 10, 3
_QUICK_S = 0.02  # for the large message; if it takes no longer, a larger one tells more
_LEAST_SHARE = 0.1  # of what the large message takes are its bytes, whatever small ones took
_PROBE_S = 5.0  # longest wait for one ping
FAR_S = 60.0  # for a worker that measures links of its own

_seqs = itertools.count(1 << 62)  # apart from those of other frames on the same links


async def measure_link(link: Link) -> LinkCost:
    """Ping with messages of two sizes, one by one and several at once; the fastest of each count.

    A lone message takes latency and overhead there and back; each further one of a burst only its
    overhead, there and back again.

    Raises:
        DeadlineExceeded: a ping took seconds.
        PeerLost: the link ended.
    """
    small_s = min([await link.probe(_SMALL, _PROBE_S) for _ in range(_SMALL_PINGS)])
    burst_s = min([await _burst(link) for _ in range(_SMALL_PINGS)])
    large = _LARGE
    large_s = await link.probe(large, _PROBE_S)
    if large_s <= _QUICK_S:
        large = _LARGER
        large_s = await link.probe(large, _PROBE_S)
    large_s = min([large_s, *[await link.probe(large, _PROBE_S) for _ in range(_LARGE_PINGS - 1)]])
    message_s = min(max(burst_s - small_s, 0.0) / (BURST - 1), small_s) / 2
    return LinkCost(
        latency_s=small_s / 2 - message_s,
        message_s=message_s,
        bytes_per_s=large / max(large_s - small_s, _LEAST_SHARE * large_s),
    )


async def measure_links(
    network: Network, reach: Reach, nodes: Nodes, neighbours: Sequence[Link]
) -> LinkSurvey:
    """Measure one link to each other node, and one inside each; expert workers measure their own.

    Raises:
        MoesaicError: somebody does not answer.
    """
    inter = [await measure_link(reach.links[workers[0]]) for workers in nodes.others]
    intra = [await measure_link(link) for link in neighbours]
    intra += [await _far(network, reach, workers) for workers in nodes.others if len(workers) > 1]
    return LinkSurvey(intra or inter, inter)


async def _far(network: Network, reach: Reach, workers: Sequence[int]) -> LinkCost:
    request = Frame(
        kind=FrameKind.REQUEST,
        epoch=reach.placement.epoch,
        seq=next(_seqs),
        body=encode(Measure(list(workers[:2]))),
    )
    [outcome] = await network.exchange([(reach.links[workers[0]], request)], FAR_S)
    if isinstance(outcome, MoesaicError):
        raise outcome
    return msgspec.msgpack.decode(outcome.body, type=LinkCost)


async def _burst(link: Link) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*(link.probe(_SMALL, _PROBE_S) for _ in range(BURST)))
    return loop.time() - started
