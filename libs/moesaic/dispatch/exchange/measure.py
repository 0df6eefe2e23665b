"""What do messages over links cost? Asked of the links themselves, when little else is on them."""

import asyncio
import itertools
from collections.abc import Sequence

import msgspec

from moesaic.dispatch.exchange.costs import LinkCost, LinkCosts, slowest
from moesaic.dispatch.exchange.orders import Measure, encode
from moesaic.dispatch.exchange.sending import Nodes, Reach
from moesaic.errors import MoesaicError
from moesaic.transport.contract import Link, Network
from moesaic.transport.frame import Frame, FrameKind

_SMALL, _LARGE, _LARGER = 0, 1 << 16, 1 << 19  # bytes
_BURST = 8  # messages at the same time
_ROUNDS = 5
_QUICK_S = 0.02  # for the large message; if it takes no longer, a larger one tells more
_LEAST_SHARE = 0.1  # of what the large message takes are its bytes, whatever small ones took
_PROBE_S = 5.0  # longest wait for one ping
FAR_S = 60.0  # for a worker that measures links of its own

_seqs = itertools.count(1 << 62)  # apart from those of other frames on the same links


def next_seq() -> int:
    """For a frame that is no part of a step's exchange."""
    return next(_seqs)


async def measure_link(link: Link) -> LinkCost:
    """Ping with messages of two sizes, one by one and several at once; the fastest of each count.

    A lone message takes latency and overhead there and back; each further one of a burst only its
    overhead, there and back again.

    Raises:
        DeadlineExceeded: a ping took seconds.
        PeerLost: the link ended.
    """
    small_s = min([await link.probe(_SMALL, _PROBE_S) for _ in range(_ROUNDS)])
    burst_s = min([await _burst(link) for _ in range(_ROUNDS)])
    large = _LARGE
    large_s = await link.probe(large, _PROBE_S)
    if large_s <= _QUICK_S:
        large = _LARGER
        large_s = await link.probe(large, _PROBE_S)
    large_s = min([large_s, *[await link.probe(large, _PROBE_S) for _ in range(_ROUNDS - 1)]])
    message_s = min(max(burst_s - small_s, 0.0) / (_BURST - 1), small_s) / 2
    return LinkCost(
        latency_s=small_s / 2 - message_s,
        message_s=message_s,
        bytes_per_s=large / max(large_s - small_s, _LEAST_SHARE * large_s),
    )


async def measure_links(
    network: Network, reach: Reach, nodes: Nodes, neighbours: Sequence[Link]
) -> LinkCosts:
    """The cost of each kind of link: the slowest of a link to every other node, and of links inside
    this node and, as their workers find them, inside those.

    Raises:
        MoesaicError: somebody does not answer.
    """
    inter = [await measure_link(reach.links[workers[0]]) for workers in nodes.others]
    intra = [await measure_link(link) for link in neighbours]
    intra += [await _far(network, reach, workers) for workers in nodes.others if len(workers) > 1]
    return LinkCosts(slowest(intra or inter), slowest(inter))


async def _far(network: Network, reach: Reach, workers: Sequence[int]) -> LinkCost:
    request = Frame(
        kind=FrameKind.REQUEST,
        epoch=reach.placement.epoch,
        seq=next_seq(),
        body=encode(Measure(list(workers[:2]))),
    )
    [outcome] = await network.exchange([(reach.links[workers[0]], request)], FAR_S)
    if isinstance(outcome, MoesaicError):
        raise outcome
    return msgspec.msgpack.decode(outcome.body, type=LinkCost)


async def _burst(link: Link) -> float:
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(*(link.probe(_SMALL, _PROBE_S) for _ in range(_BURST)))
    return loop.time() - started
