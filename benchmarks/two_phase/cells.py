"""Judgement of one cell by blocks of layers: how long every way takes, and if the right one was chosen.

A block is a stretch of time in which all workers go one way. Blocks of all ways follow each other
closely, again and again. So every repetition gives one ratio between any two ways, in which other
load of the machine cancels out.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WAYS = ("direct", "reduce", "relay")
CLOSE = 1.05  # a way that cannot be told from the fastest must still be as close as this
# Two-sided 95 % of Student's t, by degrees of freedom from 1 on.
STUDENT = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
)


@dataclass(frozen=True)
class Paired:
    """Ratio of two durations: geometric mean of blocks, with its bounds of 95 % confidence."""

    ratio: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float], others: Sequence[float]) -> "Paired":
        """Block by block, each beside the other's of the same repetition."""
        logs = [math.log(a / b) for a, b in zip(seconds, others, strict=True)]
        mean, num = statistics.fmean(logs), len(logs)
        if num == 1:
            return cls(math.exp(mean), 0.0, math.inf)
        error = STUDENT[min(num - 1, len(STUDENT)) - 1] * statistics.stdev(logs) / math.sqrt(num)
        return cls(math.exp(mean), math.exp(mean - error), math.exp(mean + error))

    def rounded(self) -> list[float]:
        """Round the ratio and its bounds, for people."""
        return [round(each, 3) for each in (self.ratio, self.least, self.most)]


def judged(blocks: Mapping[str, Sequence[float]], went: str) -> dict[str, Any]:
    """One cell.

    ``went`` is right if it is the fastest way, or not slower with 95 % confidence and within 5 %.

    Args:
        blocks: seconds of a layer, by way and for ``auto``, one of each repetition.
        went: the way that ``auto`` went.
    """
    medians = {way: statistics.median(blocks[way]) for way in WAYS}
    fastest = min(medians, key=medians.__getitem__)
    beside = Paired.of(blocks[went], blocks[fastest])
    alike = beside.least <= 1.0 and beside.ratio <= CLOSE
    cell: dict[str, Any] = {
        mode: {
            "ms": round(1e3 * statistics.median(seconds), 3),
            "ms_of_blocks": [round(1e3 * min(seconds), 3), round(1e3 * max(seconds), 3)],
        }
        for mode, seconds in blocks.items()
    }
    return cell | {
        "fastest": fastest,
        "went": went,
        "went_the_fastest": went == fastest,
        "went_right": went == fastest or alike,
        "went_to_fastest": beside.rounded(),
        "auto_to_fastest": Paired.of(blocks["auto"], blocks[fastest]).rounded(),
        "auto_to_direct": Paired.of(blocks["auto"], blocks["direct"]).rounded(),
    }


def shares(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the cells in which ``auto`` goes right, or strictly the fastest way."""
    return {
        "cells": len(cells),
        "cells_auto_goes_right": sum(cell["went_right"] for cell in cells),
        "cells_auto_goes_the_fastest": sum(cell["went_the_fastest"] for cell in cells),
        "share_of_cells_auto_goes_right": round(
            sum(cell["went_right"] for cell in cells) / len(cells), 3
        ),
        "share_of_cells_auto_goes_the_fastest": round(
            sum(cell["went_the_fastest"] for cell in cells) / len(cells), 3
        ),
        "fastest_ways": {way: sum(cell["fastest"] == way for cell in cells) for way in WAYS},
    }
