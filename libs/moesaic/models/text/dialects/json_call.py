"""Calls that are objects of JSON, with a name and arguments, in any order, read as they grow."""

import json

from moesaic.models.text.dialects.reader import Reader, Reading

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_IDS = ("id",)


def read_json_call(reader: Reader) -> Reading[bool]:
    """Read one call; false if this is none.

    Once the name is known and the arguments begin, it is a call: what is wrong with it later ends it there.
    """
    yield from reader.skip_blanks()
    if not (yield from reader.take("{")):
        return False
    name = call_id = ""
    begun = False
    arguments: str | None = None  # those that stand before the name
    while True:
        yield from reader.skip_blanks()
        key = yield from _short_text(reader)
        yield from reader.skip_blanks()
        if key is None or not (yield from reader.take(":")):
            break
        yield from reader.skip_blanks()
        if key in _NAMES and not name:
            name = (yield from _short_text(reader)) or ""
            if not name:
                break
        elif key in _ARGUMENTS and name and not begun and (yield from reader.next_char()) == "{":
            reader.begin_call(name, call_id)
            begun = True
            if not (yield from reader.json_value(reader.put_arguments)):
                return True
        else:
            pieces: list[str] = []
            if not (yield from reader.json_value(pieces.append)):
                break
            value = "".join(pieces)
            if key in _ARGUMENTS and arguments is None:
                arguments = value
            elif key in _IDS and value.startswith('"'):
                call_id = str(_loaded(value, ""))
        yield from reader.skip_blanks()
        if not (yield from reader.take(",")):
            break
    complete = bool((yield from reader.take("}")))
    if begun:
        return True
    written = _object_text(arguments)
    if not complete or not name or written is None:
        return False
    reader.begin_call(name, call_id)
    reader.put_arguments(written)
    return True


def _short_text(reader: Reader) -> Reading[str | None]:
    """Read a string, such as a name."""
    if (yield from reader.next_char()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from reader.json_value(pieces.append)):
        return None
    text = _loaded("".join(pieces), None)
    return text if isinstance(text, str) else None


def _object_text(written: str | None) -> str | None:
    """Find the object in arguments as they are written: also one in a string, and none for none."""
    if written is None or written == "null":
        return "{}"
    if written.startswith('"'):
        written = str(_loaded(written, "")).strip() or "{}"
    return written if written.startswith("{") else None


def _loaded(text: str, default: object) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return default
