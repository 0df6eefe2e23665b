"""The JSON of a request's body. What it holds is counted before it is decoded, so that no body takes long.

Work on a body holds the interpreter: in pieces where it is Python's, as a whole where it is a library's. So the bounds
here are bounds of time: no step on the largest body that they allow takes 50 ms.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from moesaic.errors import InvalidInput, MoesaicError
from moesaic.json_texts import TOO_DEEP, too_deep
from moesaic.services.gateway.http.problems import field_name

MAX_VALUES = 1 << 19  # of any kind: token ids of four contexts of 128 k
# Lists, objects and their fields, and numbers that are no integers: each costs as much as several integers.
MAX_NESTED = 1 << 16
MAX_TEXTS = 1 << 17  # the names of fields among them
MAX_DIGITS = 400  # of a number: time goes with their square
MAX_NAMED_STEPS = 8  # how deep into a body an error points
_PIECE_BYTES = 1 << 18
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")  # all digits look the same
_FRACTIONS = (b"0.", b"0e")
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
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
    # First as if all text were JSON's own, as that is quick.
    if not _is_small(_pieces(body)) and not _is_small(_outside_strings(body)):
        fix = (
            f"may hold at most {MAX_VALUES} values, {MAX_TEXTS} of them texts, {MAX_NESTED} lists, objects, fields "
            f"or fractions, and no number of more than {MAX_DIGITS} digits"
        )
        raise InvalidInput("body", fix)
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise _mistake(body, str(error)) from None


def _is_small(pieces: Iterable[bytes]) -> bool:
    num_values = num_nested = num_quotes = 0
    for piece in pieces:
        num_quotes += piece.count(b'"')
        num_values += piece.count(b",")
        num_nested += piece.count(b"[") + piece.count(b"{") + piece.count(b":")
        alike = piece.translate(_ALIKE)
        num_nested += sum(map(alike.count, _FRACTIONS))
        if num_values > MAX_VALUES or num_nested > MAX_NESTED or num_quotes > 2 * MAX_TEXTS:
            return False
        if _LONG_NUMBER in alike:
            return False
    return True


def _pieces(body: bytes) -> Iterator[bytes]:
    return (body[at : at + _PIECE_BYTES] for at in range(0, len(body), _PIECE_BYTES))


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Give a body without what its strings hold."""
    in_string, rest = 0, b""
    for piece in _pieces(body):
        piece = rest + piece
        is_cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2  # within an escape
        piece, rest = (piece[:-1], piece[-1:]) if is_cut else (piece, b"")
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'""'.join(parts[in_string::2])
        in_string = (in_string + len(parts) - 1) % 2


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
    for piece in _pieces(body):
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
