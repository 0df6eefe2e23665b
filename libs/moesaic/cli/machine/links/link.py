"""A link's rate and delay as people write them, such as 500mbit,2ms; pure."""

import re
from dataclasses import dataclass

from moesaic.cli.terminal.outcome import CommandError, Exit

RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}  # in bit/s, as tc has them
DELAYS = {"us": 1, "ms": 10**3, "s": 10**6}  # in microseconds
LEAST_RATE_BIT, MOST_DELAY_US = 10_000, 10_000_000
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")


@dataclass(frozen=True)
class LinkShape:
    """Rate and delay from one agent to another."""

    rate_bit: int  # per second, each way
    delay_us: int = 0  # of every frame on its way

    @property
    def text(self) -> str:
        """The value of ``--link`` that means the same."""
        return f"{self.rate_bit}bit,{self.delay_us}us"


def read_link(text: str) -> LinkShape:
    """Read ``--link``: ``RATE`` or ``RATE,DELAY``.

    Raises:
        CommandError: a part is wrong.
    """
    rate, comma, delay = text.partition(",")
    link = LinkShape(_read(text, rate, RATES), _read(text, delay, DELAYS) if comma else 0)
    if link.rate_bit < LEAST_RATE_BIT:
        least = f"{LEAST_RATE_BIT // RATES['kbit']}kbit"
        raise CommandError(f"--link {text}: the lowest rate is {least}", Exit.USAGE)
    if link.delay_us > MOST_DELAY_US:
        most = f"{MOST_DELAY_US // DELAYS['s']}s"
        raise CommandError(f"--link {text}: the longest delay is {most}", Exit.USAGE)
    return link


def _read(text: str, part: str, units: dict[str, int]) -> int:
    found = _NUMBER.fullmatch(part.strip().lower())
    if found is None or found[2] not in units:
        known = f"{', '.join(RATES)}; {', '.join(DELAYS)}"
        raise CommandError(
            f"--link {text}: must be a rate, or a rate and a delay with a comma, such as "
            f"500mbit,2ms (units: {known})",
            Exit.USAGE,
        )
    return round(float(found[1]) * units[found[2]])
