"""The JSON of a request's body, and what is wrong in it: where, and in which field."""

import re
from typing import Any

from pydantic_core import from_json

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.json_texts import TOO_DEEP, JsonRoom, pieces_of, too_deep
from moesaic.services.gateway.http.problems import field_name

MAX_NAMED_STEPS = 8  # how deep into a body an error points
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PLACE = re.compile(r"(.*) at line (\d+) column (\d+)", re.DOTALL)
_MARK = b"the value behind a name"
_SURROGATE = ("lone leading surrogate in hex escape", "unexpected end of hex escape")


class InvalidJson(MoesaicError):
    """A body that cannot be read."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, reason: str) -> None:
        super().__init__(f"the body is not valid JSON: {reason}")


def decode_body(body: bytes) -> Any:
    """Decode a body.

    Raises:
        InvalidInput: it holds too much, is nested too deeply, or has half a surrogate pair; names the field.
        InvalidJson: it is not JSON in UTF-8.
    """
    body = body.removeprefix(_BYTE_ORDER_MARK)
    JsonRoom().take(body, "body")
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise _mistake(body, str(error)) from None


def _mistake(body: bytes, told: str) -> MoesaicError:
    """Say what the parser found, and in which field where the JSON itself is right."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return InvalidJson("it is not UTF-8")
    found = _PLACE.fullmatch(told)
    if found is None:
        return InvalidJson(told)
    reason, line, column = found[1], int(found[2]), int(found[3])
    if reason == TOO_DEEP:
        return too_deep(_field_at(body[: _offset(body, line, column) - 1], num_steps=1))
    if reason in _SURROGATE:
        at = body.rfind(b"\\u", 0, _offset(body, line, column))
        fix = f"not valid Unicode: a lone surrogate at line {line} column {column}"
        return InvalidInput(_field_of_text(body[:at]), fix)
    return InvalidJson(told)


def _offset(body: bytes, line: int, column: int) -> int:
    """Find the byte at a place, in steps that are short."""
    start, left = 0, line - 1
    for piece in pieces_of(body):
        num_lines = piece.count(b"\n")
        if num_lines >= left:
            break
        start, left = start + len(piece), left - num_lines
    for _ in range(left):
        start = body.index(b"\n", start) + 1
    return start + column


def _field_at(begun: bytes, num_steps: int = MAX_NAMED_STEPS) -> str:
    """Name the field that a body ends in, of which this is the beginning."""
    path, _ = _last(begun)
    return field_name(["body", *path[:num_steps]])


def _field_of_text(begun: bytes) -> str:
    """Name the field that a body ends in, within a text; where that is a name, the field that has it."""
    path, value = _last(begun + b'":"%s"' % _MARK)
    if value == _MARK.decode():
        return field_name(["body", *path[:-1][:MAX_NAMED_STEPS]])
    return _field_at(begun)


def _last(begun: bytes) -> tuple[list[str | int], Any]:
    """Give the last value of an unfinished body, and the steps to it."""
    value = from_json(begun, allow_partial="trailing-strings")
    path: list[str | int] = []
    while value and isinstance(value, dict | list):
        step: Any = next(reversed(value)) if isinstance(value, dict) else len(value) - 1
        path.append(step)
        value = value[step]
    return path, value
