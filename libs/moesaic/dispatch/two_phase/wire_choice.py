"""``--wire-dtype auto``: rows as bytes where the links are so slow that packing is the shorter wait.

All workers of a layer gate the same rows, so there is one form for all links; the slowest one to
another node says which. Links are measured when they are new, and inside a node never.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog
import torch

from moesaic.dispatch.routed.route import Route
from moesaic.dispatch.two_phase.measure import measure_link
from moesaic.errors import MoesaicError
from moesaic.experts.wire_rows import pack_rows, row_bytes, unpack_rows
from moesaic.messages.wire import WireDtype
from moesaic.transport.contract import Link
from moesaic.transport.rings.channel import RingChannel

log = structlog.get_logger()

ROWS = 16  # of a batch that packing is timed for: fewer share the cost of a call among them
SURE = 2.0  # times as long as packing the saved bytes must take, for they cost an error too
MEASUREMENTS = 3  # of which the best counts
_PAUSE_S = 0.3  # between them
_REPEATS = 10  # the fastest counts


def packing_s(hidden_size: int) -> float:
    """Measure the seconds for a row to be packed and unpacked here."""
    rows, fastest_s = torch.ones(ROWS, hidden_size), float("inf")
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        unpack_rows(pack_rows(rows))
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return fastest_s / ROWS


def wire_for(bytes_per_s: float, saved_bytes: int, packing_s: float) -> WireDtype:
    """Choose the form for a link.

    Args:
        bytes_per_s: that the link carries.
        saved_bytes: of a row, if it is packed.
        packing_s: seconds for a row to be packed and unpacked.
    """
    return "int8" if saved_bytes / bytes_per_s > SURE * packing_s else "own"


class WireChooser:
    """Measures the links of a route and tells the form of rows. Lives on the engine thread's loop."""

    def __init__(
        self,
        node: str,
        hidden_size: int,
        dtype: torch.dtype,
        route: Callable[[], Route | None],
        tell: Sequence[Callable[[WireDtype], None]],
        num_sent: Callable[[], int],
    ) -> None:
        """Choose for rows ``[T, hidden_size]`` of ``dtype``.

        Args:
            node: that this worker is on.
            hidden_size: of the model.
            dtype: of rows that are not packed.
            route: the route that steps take now.
            tell: called with each choice.
            num_sent: batches that steps have sent so far: beside them nothing can be measured.
        """
        self._node, self._route, self._tell, self._num_sent = node, route, tell, num_sent
        own, packed = (row_bytes(hidden_size, dtype, wire) for wire in ("own", "int8"))
        self._saved_bytes, self._packing_s = own - packed, packing_s(hidden_size)
        self._measured: list[Link] = []

    async def look(self) -> WireDtype | None:
        """Choose anew if links are new.

        Returns:
            The choice; ``None`` if nothing was to choose, or a link failed or steps ran meanwhile.
        """
        route = self._route()
        links = [] if route is None else self._far(route)
        if route is None or links == self._measured:
            return None
        try:
            rates = [await self._bytes_per_s(link) for link in links]
        except MoesaicError as error:
            log.warning("wire.not_measured", cause=str(error))
            return None
        if not all(rates):
            return None
        self._measured = links
        slowest = min(rates, default=float("inf"))
        wire = wire_for(slowest, self._saved_bytes, self._packing_s)
        log.info(
            "wire.chosen",
            wire=wire,
            slowest_mb_per_s=round(slowest / 1e6, 1) if rates else None,
            packing_us=round(1e6 * self._packing_s, 2),
        )
        for tell in self._tell:
            tell(wire)
        return wire

    def _far(self, route: Route) -> list[Link]:
        """Links to other nodes: those inside one have a ring, or another plane of shared memory."""
        return [
            link
            for idx, link in sorted(route.links.items())
            if not isinstance(getattr(link, "channel", None), RingChannel)
            and route.placement.workers[idx].node_name != self._node
        ]

    async def _bytes_per_s(self, link: Link) -> float:
        """Measure a few times; 0 if steps ran beside every time, for then answers wait for their end."""
        fastest = 0.0
        for _ in range(MEASUREMENTS):
            before = self._num_sent()
            cost = await measure_link(link)
            if self._num_sent() == before:
                fastest = max(fastest, cost.bytes_per_s)
            await asyncio.sleep(_PAUSE_S)
        return fastest
