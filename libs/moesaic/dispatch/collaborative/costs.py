"""Costs of having a peer compute rows, as live exchanges and sparse probes have shown (DanceMoE section III-A). Pure.

A message costs ``rtt + bytes / bandwidth + queue + compute``. Probes tell the first two: they are alone on
their link. Every exchange tells the rest, whatever it took beyond: others' rows before ours in the queue,
and the computation itself.
"""

from dataclasses import dataclass

NEWEST_WEIGHS = 0.2  # in means of live exchanges
PROBE_WEIGHS = 0.3  # in means of probes
UNKNOWN_RTT_S = 0.005  # until a probe has come back
UNKNOWN_BYTES_PER_S = 12.5e6  # the same: 100 Mbit/s


@dataclass(frozen=True)
class LinkProfile:
    """One link, and the peer behind it.

    Attributes:
        rtt_s: round trip of an empty message.
        bytes_per_s: bandwidth, of both ways together.
        message_s: queue and computation of one message, beside what grows with its rows.
        row_s: the same for each of its rows.
    """

    rtt_s: float = UNKNOWN_RTT_S
    bytes_per_s: float = UNKNOWN_BYTES_PER_S
    message_s: float = 0.0
    row_s: float = 0.0

    def transfer_s(self, num_bytes: int) -> float:
        """Time on the link of a message and its answer."""
        return self.rtt_s + num_bytes / self.bytes_per_s

    def seconds(self, rows: int, row_bytes: int) -> float:
        """Predict an exchange of ``rows``, of ``row_bytes`` each there and back together."""
        return self.transfer_s(rows * row_bytes) + self.message_s + rows * self.row_s


class PeerCosts:
    """The costs of one peer, learnt while it serves.

    Attributes:
        profile: the costs as they are now.
        exchanges: number of exchanges that it rests on.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.profile, self.exchanges, self.probes = LinkProfile(), 0, 0
        # Means of exchanges
        self._rows = self._seconds = 0.0
        self._rows_squared = self._product = 0.0

    def probed(self, rtt_s: float, bytes_per_s: float) -> None:
        """Learn from pings. A smaller round trip counts more, since other load only adds time."""
        known = self.profile
        if self.probes:
            weighs = 0.5 if rtt_s < known.rtt_s else PROBE_WEIGHS
            rtt_s = known.rtt_s + weighs * (rtt_s - known.rtt_s)
            bytes_per_s = known.bytes_per_s + PROBE_WEIGHS * (bytes_per_s - known.bytes_per_s)
        self.probes += 1
        self.profile = LinkProfile(rtt_s, bytes_per_s, known.message_s, known.row_s)

    def exchanged(self, rows: int, row_bytes: int, seconds: float) -> None:
        """Learn from an exchange of ``rows`` that took ``seconds``.

        The time beyond the transfer is fitted by a line over the rows; older exchanges count less.
        """
        known = self.profile
        beyond_s = max(0.0, seconds - known.transfer_s(rows * row_bytes))
        weighs = NEWEST_WEIGHS if self.exchanges else 1.0
        self.exchanges += 1
        self._rows += weighs * (rows - self._rows)
        self._seconds += weighs * (beyond_s - self._seconds)
        self._rows_squared += weighs * (rows * rows - self._rows_squared)
        self._product += weighs * (rows * beyond_s - self._product)
        spread = self._rows_squared - self._rows**2
        row_s = (self._product - self._rows * self._seconds) / spread if spread > 1e-9 else 0.0
        row_s = min(max(row_s, 0.0), self._seconds / max(self._rows, 1.0))
        # 0 may come out as -1e-18.
        message_s = max(0.0, self._seconds - row_s * self._rows)
        self.profile = LinkProfile(known.rtt_s, known.bytes_per_s, message_s, row_s)
