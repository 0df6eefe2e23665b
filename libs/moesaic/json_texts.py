"""JSON that strangers write: what it may hold, and how deep it may be nested. It is counted before it is decoded.

Work on JSON holds the interpreter: in pieces where it is Python's, as a whole where it is a library's. So the bounds
here are bounds of time: no step on the largest JSON that they allow takes 50 ms.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic_core import from_json

from moesaic.errors import InvalidInput

MAX_DEPTH = (
    200  # of values within values; the parser's own, and whatever reads a value may go as deep
)
TOO_DEEP = "recursion limit exceeded"  # as the parser says it
MAX_VALUES = 1 << 19  # of any kind: token ids of four contexts of 128 k
# Lists, objects and their fields, and numbers that are no integers: each costs as much as several integers.
MAX_NESTED = 1 << 16
MAX_TEXTS = 1 << 17  # the names of fields among them
MAX_DIGITS = 400  # of a number: time goes with their square
_PIECE_BYTES = 1 << 18
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")  # all digits look the same
_FRACTIONS = (b"0.", b"0e")
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)


class _Left(NamedTuple):
    values: int
    nested: int
    quotes: int


class JsonRoom:
    """The room for what a request may hold in one body, or in several texts."""

    def __init__(self) -> None:
        self._left = _Left(MAX_VALUES, MAX_NESTED, 2 * MAX_TEXTS)

    def take(self, written: bytes, field: str) -> None:
        """Take what some JSON needs.

        Raises:
            InvalidInput: there is less; names ``field``.
        """
        # First as if all text were JSON's own, as that is quick.
        left = _after(self._left, pieces_of(written))
        left = left or _after(self._left, _outside_strings(written))
        if left is None:
            fix = (
                f"may hold at most {MAX_VALUES} values, {MAX_TEXTS} of them texts, {MAX_NESTED} lists, objects, "
                f"fields or fractions, and no number of more than {MAX_DIGITS} digits"
            )
            raise InvalidInput(field, fix)
        self._left = left


def too_deep(field: str) -> InvalidInput:
    """The error of a field that is nested too deeply."""
    return InvalidInput(field, f"must not be nested more than {MAX_DEPTH} deep")


def decode_text(text: str, field: str, room: JsonRoom) -> Any:
    """Decode JSON that a field holds as a text.

    Args:
        text: the JSON.
        field: its name.
        room: shared by all texts of a request.

    Raises:
        InvalidInput: it is nested too deeply, or holds too much; names ``field``.
        ValueError: it is not JSON.
    """
    room.take(text.encode(), field)
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if str(error).startswith(TOO_DEEP):
            raise too_deep(field) from None
        raise


def decode_beginning(text: str, field: str) -> Any:
    """Decode the part of a JSON text that broke off. Call ``decode_text`` first, which counts the size.

    Returns:
        The value, whose last string may be cut; None if the text is not the beginning of JSON.

    Raises:
        InvalidInput: it is nested too deeply; names ``field``.
    """
    try:
        return from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError as error:
        if str(error).startswith(TOO_DEEP):
            raise too_deep(field) from None
        return None
    except TypeError:  # half of a surrogate pair
        return None


def pieces_of(written: bytes) -> Iterator[bytes]:
    """Cut JSON into pieces that are looked at in a short time."""
    return (written[at : at + _PIECE_BYTES] for at in range(0, len(written), _PIECE_BYTES))


def _after(left: _Left, pieces: Iterable[bytes]) -> _Left | None:
    """Count pieces; None if they need more than there is."""
    values, nested, quotes = left
    for piece in pieces:
        quotes -= piece.count(b'"')
        values -= piece.count(b",")
        nested -= piece.count(b"[") + piece.count(b"{") + piece.count(b":")
        alike = piece.translate(_ALIKE)
        nested -= sum(map(alike.count, _FRACTIONS))
        if min(values, nested, quotes) < 0 or _LONG_NUMBER in alike:
            return None
    return _Left(values, nested, quotes)


def _outside_strings(written: bytes) -> Iterator[bytes]:
    """Give JSON without what its strings hold."""
    in_string, rest = 0, b""
    for piece in pieces_of(written):
        piece = rest + piece
        # Within an escape
        is_cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        piece, rest = (piece[:-1], piece[-1:]) if is_cut else (piece, b"")
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'""'.join(parts[in_string::2])
        in_string = (in_string + len(parts) - 1) % 2
