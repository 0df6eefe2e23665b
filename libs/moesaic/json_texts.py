"""JSON that strangers write: how deep it may be nested. Whatever reads a value may go as deep as that."""

from typing import Any

from pydantic_core import from_json

from moesaic.errors import InvalidInput

MAX_DEPTH = 200  # of values within values; the parser's own
TOO_DEEP = "recursion limit exceeded"  # as the parser says it


def too_deep(field: str) -> InvalidInput:
    """The error of a field that is nested too deeply."""
    return InvalidInput(field, f"must not be nested more than {MAX_DEPTH} deep")


def decode_text(text: str, field: str) -> Any:
    """Decode JSON that a field holds as a text.

    Raises:
        InvalidInput: it is nested too deeply; names ``field``.
        ValueError: it is not JSON.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        if str(error).startswith(TOO_DEEP):
            raise too_deep(field) from None
        raise
