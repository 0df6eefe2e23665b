"""Scaling of attention and experts apart: fleets of GPUs simulated over two days, and a real suite that scales.

Each part of the benchmark is a module with ``measure(quick)``: figures, configuration and notes of its own.
"""

from typing import Any

from benchmarks.elastic import real, simulated

PARTS = (simulated, real)


def run(quick: bool) -> dict[str, Any]:
    """Measure all parts, and join what they found."""
    result: dict[str, Any] = {"config": {}, "figures": {}, "paper": {}, "notes": []}
    for part in PARTS:
        measured = part.measure(quick)
        for key in ("config", "figures", "paper"):
            result[key].update(measured[key])
        result["notes"] += measured["notes"]
    return result
