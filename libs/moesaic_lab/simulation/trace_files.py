"""Files of arrivals and of rates, plain or gzip: CSV with a header, or JSON lines with names of prompt blocks.

``read_arrivals`` reads what ``moesaic.cli.load.datasets.trace_rows`` describes; ``hash_ids`` name blocks of 512 tokens.
``read_rates`` reads the columns ``model``, ``window_start_s`` and ``requests_per_s``.
"""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.cli.load.datasets.trace_rows import number, opened, trace_rows
from moesaic.errors import InvalidInput
from moesaic_lab.simulation.arrivals import ArrivalTrace, RateCurve

NAMED_TOKENS = 512  # of a block that ``hash_ids`` names


def read_arrivals(path: Path) -> ArrivalTrace:
    """Read arrivals.

    Where blocks are named, the tokens of those seen earlier in the file count as cached, as in a cache without end.

    Raises:
        InvalidInput: the file is no such trace, with the first thing that is wrong.
    """
    rows = list(trace_rows(path))
    if not rows:
        raise InvalidInput("trace", f"must have requests, {path.name} has none")
    at_s = np.array([row.time for row in rows])
    prompts = np.array([row.prompt_tokens for row in rows])
    answers = np.array([row.answer_tokens for row in rows])
    cached = np.array(list(_cached(row.parts for row in rows)), np.int64)
    return ArrivalTrace.of(at_s, prompts, answers, cached)


def read_rates(path: Path, model: str) -> RateCurve:
    """Read the rates of one model.

    Raises:
        InvalidInput: the file is no such curve, or has no rates of the model.
    """
    found: list[tuple[float, float]] = []
    models = set[str]()
    with opened(path) as file:
        for row in csv.DictReader(file):
            models.add(row.get("model", ""))
            if row.get("model") == model:
                found.append((number(row, "window_start_s"), number(row, "requests_per_s")))
    if len(found) < 2:
        raise InvalidInput("model", f"must be one of {', '.join(sorted(models))}, got {model!r}")
    starts, per_s = np.array(found).T
    window_s = float(starts[1] - starts[0])
    if not np.allclose(np.diff(starts), window_s):
        raise InvalidInput("window_start_s", "must ascend by equal steps")
    return RateCurve(per_s, window_s)


def _cached(names: Iterable[tuple[Any, ...]]) -> Iterator[int]:
    """Count the tokens of the first blocks that were seen before."""
    seen = set[Any]()
    for blocks in names:
        known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        yield known * NAMED_TOKENS
