"""Rows of arrival traces, plain or gzip: CSV with a header, or JSON lines.

=================  ======================================  ===================================================
What               Columns or keys                         Meaning
=================  ======================================  ===================================================
time               ``timestamp_s``, ``timestamp``          of the arrival
tokens             ``input_tokens``, ``input_length``      of the prompt
tokens             ``output_tokens``, ``output_length``    of the answer
names              ``hash_ids``, only in JSON lines        of parts of the prompt: the same ones have the same tokens
=================  ======================================  ===================================================
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from moesaic.errors import InvalidInput

MOST_TOKENS = 1 << 24  # of a prompt or an answer: more than any model takes


@dataclass(frozen=True)
class TraceColumns:
    """Names of columns, the first of which that a row has is read."""

    time: tuple[str, ...] = ("timestamp_s", "timestamp")
    prompt_tokens: tuple[str, ...] = ("input_tokens", "input_length")
    answer_tokens: tuple[str, ...] = ("output_tokens", "output_length")
    parts: str = "hash_ids"


@dataclass(frozen=True)
class TraceRow:
    """One arrival; ``parts`` are names of equally long parts of its prompt."""

    time: float
    prompt_tokens: int
    answer_tokens: int
    parts: tuple[Any, ...] = ()


def trace_rows(path: Path, columns: TraceColumns | None = None) -> Iterator[TraceRow]:
    """Read the arrivals of a file, in its order.

    Raises:
        InvalidInput: the file is no such trace, with the first thing that is wrong.
    """
    columns = columns or TraceColumns()
    with opened(path) as file:
        is_lines = ".jsonl" in path.suffixes
        rows = (
            (json.loads(line) for line in file if line.strip())
            if is_lines
            else csv.DictReader(file)
        )
        for row in rows:
            if not isinstance(row, dict):
                raise InvalidInput("trace", f"must have an object in each line, got {row!r:.60}")
            parts = row.get(columns.parts) or ()
            if not isinstance(parts, list | tuple):
                raise InvalidInput(columns.parts, f"must be a list in each row, got {parts!r:.60}")
            yield TraceRow(
                number(row, *columns.time),
                _tokens(row, columns.prompt_tokens),
                _tokens(row, columns.answer_tokens),
                tuple(parts),
            )


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open a file, packed or not.

    Raises:
        InvalidInput: it cannot be read, or what is read within the block is no JSON.
    """
    opening = gzip.open if path.suffix == ".gz" else open
    try:
        with opening(path, "rt", encoding="utf-8", newline="") as file:
            yield file
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, csv.Error) as error:
        raise InvalidInput("trace", f"{path} cannot be read: {error}") from error


def _tokens(row: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = number(row, *names)
    if found > MOST_TOKENS:
        raise InvalidInput(_named(row, names), f"must be {MOST_TOKENS} at most, got {found:g}")
    return int(found)


def _named(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((each for each in names if each in row), names[0])


def number(row: Mapping[str, Any], *names: str) -> float:
    """Read the finite number in the first of these columns that a row has.

    Raises:
        InvalidInput: there is none.
    """
    name = _named(row, names)
    try:
        found = float(row[name])
    except (KeyError, TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise InvalidInput(name, f"must be a number in each row, got {row.get(name)!r:.60}")
    return found
