"""Times at which requests of a load are due: at a rate, or at one that grows."""

import math
import random
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal


@dataclass(frozen=True)
class RampUp:
    """A rate that grows from the first request to the last.

    Attributes:
        strategy: by equal steps, or by equal factors.
        start_rps: first rate, in requests a second.
        end_rps: last one.
    """

    strategy: Literal["linear", "exponential"]
    start_rps: float
    end_rps: float

    def rates(self, count: int) -> list[float]:
        """List the rate at each request."""
        parts = [number / max(1, count - 1) for number in range(count)]
        if self.strategy == "linear":
            return [self.start_rps + (self.end_rps - self.start_rps) * part for part in parts]
        return [self.start_rps * (self.end_rps / self.start_rps) ** part for part in parts]

    def changes(self, due: list[float], began: datetime) -> list[dict[str, Any]]:
        """List the whole rates that were reached, and when, as ``vllm bench serve`` does.

        Args:
            due: seconds of the requests.
            began: time of the load's start.
        """
        now = whole(self.start_rps)
        found = [{"rps": now, "timestamp": began.isoformat()}]
        for at_s, rate in zip(due, self.rates(len(due)), strict=True):
            at = (began + timedelta(seconds=at_s)).isoformat()
            steps = range(math.floor(now) + 1, math.floor(rate) + 1)
            found += [{"rps": step, "timestamp": at} for step in steps]
            now = max(now, math.floor(rate))
        return found


def whole(rate: float) -> float:
    """Write a whole rate as vLLM does, which has no others here."""
    return int(rate) if float(rate).is_integer() else rate


def due_times(
    count: int, rate: float, burstiness: float, seed: int, ramp_up: RampUp | None = None
) -> list[float]:
    """Draw when requests are due, in seconds; at a constant rate the last one is due at ``count / rate``.

    Args:
        count: requests.
        rate: requests a second; infinite: all are due at once.
        burstiness: shape of the Gamma distribution of gaps; 1: a Poisson process, more: more even.
        seed: the same one draws the same times.
        ramp_up: rates instead of ``rate``.
    """
    if math.isinf(rate) and ramp_up is None:
        return [0.0] * count
    rng, due, now = random.Random(seed), list[float](), 0.0
    for each in ramp_up.rates(count) if ramp_up else [rate] * count:
        even = 1 / each
        now += (
            rng.gammavariate(burstiness, even / burstiness) if math.isfinite(burstiness) else even
        )
        due.append(now)
    scale = count / rate / now if now and ramp_up is None else 1.0
    return [each * scale for each in due]
