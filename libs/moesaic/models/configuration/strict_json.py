"""JSON objects from outside, read strictly: a key that comes twice has two meanings, and is refused by name."""

import json
import re
import reprlib
from collections.abc import Iterator
from typing import Any

from moesaic.errors import CheckpointError

Pairs = list[tuple[str, Any]]
_HALVES = re.compile(rb"\\u[dD][89a-fA-F]")
_short = reprlib.Repr()
_short.maxstring, _short.maxother = 200, 200


def shown(value: Any) -> str:
    """Show a value in an error, shortened: files may hold long and deep ones."""
    return _short.repr(value)


def parse_object(raw: bytes, file: str, what: str = "") -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        raw: text of the object in UTF-8.
        file: name of the file, for errors.
        what: name of the part of the file that is parsed, with a colon, as in "its header: ";
            empty: the whole file.

    Raises:
        CheckpointError: the text is not UTF-8, not JSON, no object, nested too deep, or one of its
            objects has a key twice.
    """
    repeated: list[tuple[str, dict[str, Any]]] = []

    def unique(pairs: Pairs) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            repeated.append((_first_repeated(pairs), found))
        return found

    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique, parse_int=_number)
        # Half a character, which nobody can print, or both halves.
        if _HALVES.search(raw):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise CheckpointError(file, f"{what}is nested too deep") from error
    except ValueError as error:
        raise CheckpointError(file, f"{what}is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(file, f"{what}expected a JSON object, got {type(value).__name__}")
    # The outermost is closed last.
    for key, holder in repeated[-1:]:
        path = ".".join([*_path_to(holder, value), key])
        raise CheckpointError(file, f"{what}has the key {path} twice: leave one out")
    return value


def _number(text: str) -> int | float:
    # Other readers take this for a fraction, and refuse it as a size.
    return -0.0 if text == "-0" else int(text)


def _first_repeated(pairs: Pairs) -> str:
    seen = set[str]()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key comes twice")


def _path_to(wanted: dict[str, Any], root: Any) -> list[str]:
    """Find the keys that lead to an object; none if another value has replaced it."""
    waiting: list[tuple[list[str], Any]] = [([], root)]
    while waiting:
        path, value = waiting.pop()
        if value is wanted:
            return path
        waiting += [([*path, key], inner) for key, inner in _inside(value)]
    return []


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from ((str(index), inner) for index, inner in enumerate(value))
