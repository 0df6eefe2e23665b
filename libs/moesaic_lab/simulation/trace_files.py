"""Files of arrivals and of rates, plain or gzip: CSV with a header, or JSON lines with names of prompt blocks.

==============================================================  =========================================
Columns or keys                                                 Read by
==============================================================  =========================================
``timestamp_s``, ``input_tokens``, ``output_tokens``            ``read_arrivals``; ``client`` is passed over
the same and ``hash_ids``, names of blocks of 512 tokens        ``read_arrivals``, of JSON lines
``model``, ``window_start_s``, ``requests_per_s``               ``read_rates``
==============================================================  =========================================
"""

import csv
import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from moesaic.errors import InvalidInput
from moesaic_lab.simulation.arrivals import ArrivalTrace, RateCurve

NAMED_TOKENS = 512  # of a block that ``hash_ids`` names


def read_arrivals(path: Path) -> ArrivalTrace:
    """Read arrivals.

    Where blocks are named, the tokens of those seen earlier in the file count as cached, as in a cache without end.

    Raises:
        InvalidInput: the file is no such trace, with the first thing that is wrong.
    """
    with _opened(path) as file:
        is_lines = ".jsonl" in path.suffixes
        rows = [
            _arrival(row) for row in (map(json.loads, file) if is_lines else csv.DictReader(file))
        ]
    if not rows:
        raise InvalidInput("trace", f"must have requests, {path.name} has none")
    at_s, prompts, answers, names = zip(*rows, strict=True)
    cached = np.array(list(_cached(names)), np.int64)
    return ArrivalTrace.of(np.array(at_s), np.array(prompts), np.array(answers), cached)


def read_rates(path: Path, model: str) -> RateCurve:
    """Read the rates of one model.

    Raises:
        InvalidInput: the file is no such curve, or has no rates of the model.
    """
    found: list[tuple[float, float]] = []
    models = set[str]()
    with _opened(path) as file:
        for row in csv.DictReader(file):
            models.add(row.get("model", ""))
            if row.get("model") == model:
                found.append((_number(row, "window_start_s"), _number(row, "requests_per_s")))
    if len(found) < 2:
        raise InvalidInput("model", f"must be one of {', '.join(sorted(models))}, got {model!r}")
    starts, per_s = np.array(found).T
    window_s = float(starts[1] - starts[0])
    if not np.allclose(np.diff(starts), window_s):
        raise InvalidInput("window_start_s", "must ascend by equal steps")
    return RateCurve(per_s, window_s)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInput("trace", f"{path} cannot be read: {error}") from error


def _arrival(row: dict[str, Any]) -> tuple[float, int, int, tuple[int, ...]]:
    at_s = _number(row, "timestamp_s")
    prompt, answer = _number(row, "input_tokens"), _number(row, "output_tokens")
    return at_s, int(prompt), int(answer), tuple(row.get("hash_ids") or ())


def _number(row: dict[str, Any], column: str) -> float:
    try:
        return float(row[column])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            column, f"must be a number in each row, got {row.get(column)!r}"
        ) from error


def _cached(names: Iterable[tuple[int, ...]]) -> Iterator[int]:
    """Count the tokens of the first blocks that were seen before."""
    seen = set[int]()
    for blocks in names:
        known = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        yield known * NAMED_TOKENS
