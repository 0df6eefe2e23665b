"""Pings of two sizes tell the latency of a link and the cost of its bytes."""

from dataclasses import dataclass, field

import pytest

from moesaic.transport.probing import BYTES, MORE_BYTES, measure_round_trip


@dataclass
class FakeLink:
    """Takes a fixed time and some for each byte, and twice as long every other time."""

    byte_s: float
    probed: list[int] = field(default_factory=list)

    async def probe(self, nbytes: int, deadline_s: float) -> float:
        self.probed.append(nbytes)
        return (0.002 + nbytes * self.byte_s) * (1 + self.probed.count(nbytes) % 2)


async def test_the_fastest_of_each_size_counts() -> None:
    link = FakeLink(byte_s=1e-6)

    rtt_s, byte_s = await measure_round_trip(link, 3, 2)  # type: ignore[arg-type]

    assert rtt_s == pytest.approx(0.002)
    assert byte_s == pytest.approx(1e-6)


@pytest.mark.parametrize(("byte_s", "largest"), [(1e-6, BYTES), (1e-9, MORE_BYTES)])
async def test_more_bytes_are_sent_only_where_they_are_quick(byte_s: float, largest: int) -> None:
    link = FakeLink(byte_s)

    await measure_round_trip(link, 1, 1)  # type: ignore[arg-type]

    assert max(link.probed) == largest


async def test_no_byte_is_free() -> None:
    link = FakeLink(byte_s=0.0)

    _, byte_s = await measure_round_trip(link, 2, 1)  # type: ignore[arg-type]

    assert byte_s > 0
