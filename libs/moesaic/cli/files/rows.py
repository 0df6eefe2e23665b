"""Rows to classify: JSON lines ``{"id", "text", "labels": [...], "label": index}``."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.cli.terminal.outcome import using


@dataclass(frozen=True)
class Row:
    """One text with the labels it may get, and the index of the right one where that is known."""

    row_id: Any
    text: str
    labels: tuple[str, ...]
    label: int | None


@dataclass(frozen=True)
class BadRow:
    """A line that is no row."""

    row_id: Any
    problem: str


def parse_row(line: bytes, number: int, default_labels: tuple[str, ...] = ()) -> Row | BadRow:
    """Read one line; ``number`` stands in for an id that is missing."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return BadRow(number, f"not UTF-8: {error.reason} at byte {error.start + 1} of the line")
    except ValueError as error:
        return BadRow(number, f"not JSON: {error}")
    if not isinstance(value, dict):
        return BadRow(number, "not a JSON object")
    row_id = value.get("id", number)
    text, labels, label = value.get("text"), value.get("labels", default_labels), value.get("label")
    if not isinstance(text, str):
        return BadRow(row_id, "text: a string is needed")
    if not isinstance(labels, list | tuple) or not all(isinstance(name, str) for name in labels):
        return BadRow(row_id, "labels: a list of strings is needed")
    if not labels:
        return BadRow(row_id, "labels: missing; put them into the row or give --labels")
    if label is not None and not (type(label) is int and 0 <= label < len(labels)):
        return BadRow(row_id, f"label: must be an index in 0..{len(labels) - 1}, got {label!r}")
    return Row(row_id, text, tuple(labels), label)


def read_rows(path: Path, default_labels: tuple[str, ...] = ()) -> Iterator[Row | BadRow]:
    """The rows of a JSON-lines file, one after the other; ``.gz`` files are decompressed.

    Raises:
        CommandError: the file cannot be read.
    """
    with (
        using(f"--file {path}"),
        gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines,
    ):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield parse_row(line, number, default_labels)
