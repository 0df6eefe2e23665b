"""Time to the first token of an answer to a short prompt, in steps of the engine.

Every side of ``moesaic bench engine`` is measured, in turns.
"""

import statistics
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from benchmarks.common.turns import ratios, spread
from benchmarks.engine.sides import Prompt, Side

PROMPT_TOKENS = 16
STREAM_TOKENS = 24
STREAMS = 8  # in each turn


def first_tokens(
    sides: Mapping[str, Side], peers: tuple[str, ...], rounds: int, draw: Callable[[], Prompt]
) -> dict[str, Any]:
    """Stream answers on each side, one at a time.

    Args:
        sides: sides that take part, by name; ``local`` must be one.
        peers: names of sides that ours are compared with, where they take part.
        rounds: turns of all sides.
        draw: a new prompt of ``PROMPT_TOKENS`` tokens.

    Returns:
        For each side the ms from request to first token, the ms of a step of one row, which is the mean gap between
        the tokens after it, and the first in steps: each the median of all streams, with the least and the most of
        turns. ``best_peer_over_local``, ``best_peer_over_disaggregated``: how many times as long the fastest peer's
        first token takes.
    """
    first: dict[str, list[list[float]]] = {name: [] for name in sides}  # turns, their streams: ms
    step: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            streams = [side.stream(draw(), STREAM_TOKENS) for _ in range(STREAMS)]
            first[name].append([times[0] * 1e3 for times in streams])
            gaps = [(times[-1] - times[0]) / (STREAM_TOKENS - 1) for times in streams]
            step[name].append([gap * 1e3 for gap in gaps])
    figures: dict[str, Any] = {}
    for name in sides:
        steps = [ratios(*turn) for turn in zip(first[name], step[name], strict=True)]
        figures[f"{name}_ms"] = _spread(first[name])
        figures[f"{name}_step_ms"] = _spread(step[name])
        figures[f"{name}_steps"] = _spread(steps)
    best_peer = min(figures[f"{name}_ms"]["median"] for name in peers if name in sides)
    for ours in ("local", "disaggregated"):
        if ours in sides:
            ratio = best_peer / figures[f"{ours}_ms"]["median"]
            figures[f"best_peer_over_{ours}"] = round(ratio, 3)
    return figures


def _spread(turns: list[list[float]]) -> dict[str, float]:
    """Report the median of all streams, and the range of the turns' medians."""
    of_streams = {"median": round(statistics.median(chain.from_iterable(turns)), 2)}
    return {**spread(map(statistics.median, turns), 2), **of_streams}
