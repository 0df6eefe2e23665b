"""Checked access to the JSON files of a model directory: every complaint names the file and the field."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at ``path``.

    Raises:
        CheckpointError: there is no such file, or it does not hold a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(str(path), "no such file, or it cannot be read") from error
    except ValueError as error:
        raise CheckpointError(path.name, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(path.name, f"expected a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """The fields of one JSON object, read with their types.

    ``default`` stands in for a field that is missing or null; without one the field is required.
    Every reader raises ``CheckpointError`` where the value is not what it must be.
    """

    def __init__(self, file: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self._file, self._values, self._prefix = file, values, prefix

    def error(self, name: str, problem: str) -> CheckpointError:
        """The complaint about field ``name``, for the caller to raise."""
        return CheckpointError(self._file, f"{self._prefix}{name}: {problem}")

    def has(self, name: str) -> bool:
        """Whether field ``name`` is there and not null."""
        return self._values.get(name) is not None

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer that is at least ``least``."""
        value = self._get(name, default)
        if type(value) is not int or value < least:
            raise self.error(name, f"expected an integer of at least {least}, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None, *, zero: bool = False) -> float:
        """A positive, finite number, or 0 where ``zero`` allows it."""
        value = self._get(name, default)
        if type(value) not in (int, float) or not (0 < value < math.inf or (zero and value == 0)):
            raise self.error(name, f"expected a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, f"expected true or false, got {value!r}")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """One of ``allowed``."""
        value = self._get(name, default)
        if value not in allowed:
            raise self.error(name, f"{value!r} is not supported; supported: {', '.join(allowed)}")
        return str(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of integers, one integer, or nothing."""
        value = self._values.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item >= 0 for item in values):
            raise self.error(name, f"expected an integer or a list of integers, got {value!r}")
        return tuple(values)

    def group(self, name: str) -> "Fields":
        """The fields of the object in field ``name``; none where it is missing."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, got {value!r}")
        return Fields(self._file, value, f"{self._prefix}{name}.")

    def _get(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        if value is None and default is None:
            raise self.error(name, "is missing")
        return default if value is None else value
