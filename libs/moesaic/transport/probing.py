"""Cost of messages over a link, by pings of two sizes."""

from moesaic.transport.contract import Link

# One round trip or two, and TCP has not found its speed: where that is quick, more bytes tell more.
BYTES, MORE_BYTES = 1 << 16, 1 << 19
QUICK_S = 0.02
LEAST_SHARE = 0.1  # of what a large message takes are its bytes, whatever small ones took
PROBE_S = 5.0  # longest wait for one ping


async def measure_round_trip(link: Link, num_small: int, num_large: int) -> tuple[float, float]:
    """Ping one by one; the fastest of each size counts, since other load only adds time.

    Args:
        link: link to measure.
        num_small: pings without payload.
        num_large: pings with payload.

    Returns:
        Seconds of an empty message and its answer, and of each byte more.

    Raises:
        DeadlineExceeded: a ping took seconds.
        PeerLost: the link ended.
    """
    small_s = min([await link.probe(0, PROBE_S) for _ in range(num_small)])
    num_bytes, large_s = BYTES, await link.probe(BYTES, PROBE_S)
    if large_s <= QUICK_S:
        num_bytes, large_s = MORE_BYTES, await link.probe(MORE_BYTES, PROBE_S)
    more = [await link.probe(num_bytes, PROBE_S) for _ in range(num_large - 1)]
    large_s = min([large_s, *more])
    return small_s, max(large_s - small_s, LEAST_SHARE * large_s) / num_bytes
