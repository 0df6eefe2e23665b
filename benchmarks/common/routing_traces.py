"""Recorded routing, for benchmarks to schedule and to place."""

from pathlib import Path

from moesaic.placement.traffic.trace import Phase, Trace

DEMO_TRACE = Path(__file__).parents[1] / "data/demo.moetrace"
# What a step waits for differs: few rows, or nearly every expert.
KINDS: dict[str, tuple[Phase, ...]] = {"decode": ("decode",), "prefill": ("prefill", "mixed")}
DEMO_FLEETS = ((4, 8), (4, 10), (8, 6))  # instances, slots of each


def demo_trace() -> Trace:
    """The demo model's routing on twelve task sets; see ``benchmarks/data/README.md``."""
    return Trace.decode(DEMO_TRACE.read_bytes())
