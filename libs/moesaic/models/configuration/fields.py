"""Checked access to the JSON files of a model directory: every error names the file and the field."""

from collections.abc import Container, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moesaic.errors import CheckpointError
from moesaic.models.configuration.strict_json import parse_object, shown

MOST = (1 << 31) - 1  # of any size or token id
_LEAST_NUMBER, _MOST_NUMBER = 2.0**-126, 2.0**127  # normal in float32


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file at ``path``.

    Raises:
        CheckpointError: there is no such file, it does not hold a JSON object, or an object in it has a key twice.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(str(path), "no such file") from error
    except OSError as error:
        raise CheckpointError.unreadable(str(path), error) from error
    return parse_object(raw, path.name)


def read_text(path: Path) -> str:
    """Read the text in the file at ``path``.

    Raises:
        CheckpointError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError.unreadable(path.name, error) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(path.name, f"is not UTF-8: {error}") from error


class Fields:
    """The fields of one JSON object, read with their types.

    A field that the object lacks has its default; without one it is required. A null is a value, which
    only ``has`` and ``sizes`` take. Every reader raises ``CheckpointError`` for a value of another
    type or range.
    """

    def __init__(
        self,
        file: str,
        values: Mapping[str, Any],
        prefix: str = "",
        defaults: Mapping[str, Any] = MappingProxyType({}),
        asked: set[str] | None = None,
    ) -> None:
        """Read ``values`` of ``file``; for an object in it, give its ``prefix`` and the file's ``asked``."""
        self._file, self._values, self._prefix = file, values, prefix
        self._defaults, self._spelled = defaults, dict[str, str]()
        self.asked = set[str]() if asked is None else asked

    def filled(self, defaults: Mapping[str, Any], spellings: Mapping[str, str]) -> "Fields":
        """Return the same fields with defaults.

        Args:
            defaults: values of missing fields.
            spellings: by the name of a field, another name for it.

        Raises:
            CheckpointError: a field is there under both names, with two values.
        """
        filled = Fields(self._file, dict(self._values), self._prefix, defaults, self.asked)
        for name, other in spellings.items():
            self._ask(other)
            if self._values.get(other) is not None:
                if self._values.get(name) is None:
                    filled._values = {**filled._values, name: self._values[other]}
                    filled._spelled[name] = other
                elif self._values[name] != self._values[other]:
                    raise self.contradiction(name, self, other)
        return filled

    def error(self, name: str, problem: str) -> CheckpointError:
        """Make the error about field ``name``, for the caller to raise."""
        return CheckpointError(self._file, f"{self.path(name)}: {problem}")

    def contradiction(self, name: str, others: "Fields", other: str) -> CheckpointError:
        """Make the error that ``name`` and field ``other`` of ``others`` mean the same and differ."""
        mine, theirs = self._values.get(name), others._values.get(other)
        return self.error(
            name,
            f"is {shown(mine)}, but {others.path(other)} is {shown(theirs)}, and both mean the same: leave one out",
        )

    def path(self, name: str) -> str:
        """Spell field ``name`` as the file does, with the objects that it is in."""
        return self._prefix + self._spelled.get(name, name)

    def has(self, name: str) -> bool:
        """Return true if field ``name``, or its default, is there and not null."""
        return self._find(name) is not None

    def gives(self, name: str) -> bool:
        """Return true if the file itself has a field ``name`` that is not null."""
        self._ask(name)
        return self._values.get(name) is not None

    def size(self, name: str, *, least: int = 1, most: int = MOST) -> int:
        """Read an integer in ``least..most``."""
        value = self._get(name)
        if type(value) is not int or value < least:
            raise self.error(name, f"expected an integer of at least {least}, got {shown(value)}")
        if value > most:
            raise self.error(name, f"expected an integer of at most {most}, got {shown(value)}")
        return value

    def number(self, name: str, *, zero: bool = False) -> float:
        """Read a positive number that float32 can hold, or 0 if ``zero`` allows it."""
        value = self._get(name)
        if type(value) in (int, float) and (
            _LEAST_NUMBER <= value <= _MOST_NUMBER or (zero and value == 0)
        ):
            return float(value)
        raise self.error(
            name, f"expected a positive number that float32 can hold, got {shown(value)}"
        )

    def flag(self, name: str) -> bool:
        """Read a boolean."""
        value = self._get(name)
        if type(value) is not bool:
            raise self.error(name, f"expected true or false, got {shown(value)}")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], *, lowered: bool = False) -> str:
        """Read one of ``allowed``; ``lowered``: upper and lower case are the same."""
        value = self._get(name)
        found = value.lower() if lowered and isinstance(value, str) else value
        if found not in allowed:
            raise self.error(
                name, f"{shown(value)} is not supported; supported: {', '.join(allowed)}"
            )
        return str(found)

    def choices(self, name: str, allowed: tuple[str, ...], as_many: str) -> tuple[str, ...]:
        """Read a list of as many entries as field ``as_many`` says, each one of ``allowed``."""
        value, count = self._get(name), self.size(as_many)
        if not isinstance(value, list) or len(value) != count:
            found = len(value) if isinstance(value, list) else shown(value)
            raise self.error(
                name, f"expected a list of {count} entries, as {as_many} says, got {found}"
            )
        for entry in value:
            if entry not in allowed:
                raise self.error(
                    name, f"{shown(entry)} is not supported; supported: {', '.join(allowed)}"
                )
        return tuple(value)

    def sizes(self, name: str) -> tuple[int, ...]:
        """Read a list of integers, one integer, or nothing."""
        value = self._find(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and 0 <= item <= MOST for item in values):
            expected = f"an integer or a list of integers, each in 0..{MOST}"
            raise self.error(name, f"expected {expected}, got {shown(value)}")
        return tuple(values)

    def group(self, name: str) -> dict[str, Any]:
        """Read the object in field ``name``; an empty one if it is missing or null."""
        value = self._find(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"expected an object, got {shown(value)}")
        return dict(value or {})

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the texts of a list, or the names of a group; of anything else none, for this is a hint."""
        found = self._find(name)
        return (
            tuple(each for each in found if isinstance(each, str))
            if isinstance(found, list | dict)
            else ()
        )

    def under(self, name: str, values: Mapping[str, Any]) -> "Fields":
        """Return ``values`` as the fields of the object ``name``."""
        return Fields(self._file, values, f"{self._prefix}{name}.", asked=self.asked)

    def _ask(self, name: str) -> None:
        self.asked.add(self._prefix + name)

    def refuse_unread(self, without_effect: Container[str], why: str) -> None:
        """Refuse a field of the file that was never read, with the reason ``why``.

        Fields that are null, false or empty, and those ``without_effect``, are accepted.
        """
        for name, value in self._values.items():
            known = self._prefix + name in self.asked or name in without_effect
            if not known and value is not None and value is not False and value not in ("", [], {}):
                raise self.error(name, f"{shown(value)} {why}")

    def _find(self, name: str) -> Any:
        self._ask(name)
        return self._values[name] if name in self._values else self._defaults.get(name)

    def _get(self, name: str) -> Any:
        value = self._find(name)
        if name not in self._values and value is None:
            raise self.error(name, "is missing")
        return value
