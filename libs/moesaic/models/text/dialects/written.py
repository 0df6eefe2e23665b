"""Values between tags in the form of templates: strings without quotes, other values as JSON or in Python's form."""

import json
import math
import re
from collections.abc import Callable
from typing import Any

from moesaic.models.text.schemas.reading import ALL_KINDS, Values, kind_of

MAX_PYTHON = 1 << 16  # characters of a value in Python's form
_NO_VALUE = object()
_NO_TEXTS = frozenset(("null", "array", "object", "string"))
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_MAX_NUMBER = 400
# A string that is not certain to be one after so many characters is not streamed.
MAX_UNCERTAIN = 300
_WORDS = {"True": "true", "False": "false", "None": "null"}
# A string without its closing quote ends with the text, so that no character is scanned twice.
_IN_PYTHON = re.compile(
    r"""
    (?P<text>'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z))
    | (?P<word>\b(?:True|False|None)\b)
    | (?P<open>\() | (?P<close>\)) | (?P<comma>,)(?=\s*[\]})])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
# A value that may also be null or JSON is a string as soon as it cannot become one of these.
_NOT_YET_TEXT = re.compile(r"\s*(?:$|[\"\[{]|n(?:u(?:l(?:l\s*)?)?)?$|N(?:o(?:n(?:e\s*)?)?)?$)")


def as_json(value: Any) -> str:
    """Write a value as JSON, in the form of calls in answers."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _loaded(written: str) -> Any:
    """Read JSON; returns ``_NO_VALUE`` if the text is invalid."""
    try:
        return json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _NO_VALUE


def is_certain(written: str, values: Values) -> bool:
    """True if every value with this beginning is a string."""
    if "string" not in values.kinds or values.kinds == ALL_KINDS or values.first:
        return False
    if any(kind_of(one) != "string" for one in values.listed.values()):
        return False
    return values.kinds == {"string"} or not _NOT_YET_TEXT.match(written)


def is_json(written: str) -> bool:
    """True if a text is valid JSON."""
    return _loaded(written) is not _NO_VALUE


class GrowingValue:
    """A value that is being read. It is streamed as soon as it is certain to be a string.

    Args:
        give: takes pieces of JSON.
        values: the values that the schema allows; None: the schema does not say.
    """

    def __init__(self, give: Callable[[str], None], values: Values | None) -> None:
        self._give, self._values = give, values
        self._kept: list[str] = []
        self._length = 0
        self._flows = False
        self.may_be_text = values is None or "string" in values.kinds

    @property
    def is_empty(self) -> bool:
        """True if nothing was read so far."""
        return not self._length

    def put(self, text: str) -> None:
        """Add a piece of the text."""
        self._length += len(text)
        if not text:
            return
        if self._flows:
            self._give(as_json(text)[1:-1])
            return
        self._kept.append(text)
        if self._values is None or self._length - len(text) > MAX_UNCERTAIN:
            return
        if is_certain("".join(self._kept), self._values):
            self._give(as_json("".join(self._kept))[:-1])
            self._flows = True

    def end(self, *, closed: bool) -> None:
        """Give the rest of the value. If it broke off, the written text is given unchanged."""
        if self._flows:
            self._give('"' if closed else "")
        else:
            written = "".join(self._kept)
            self._give(json_of(written, self._values) if closed else written)


def json_of(written: str, values: Values | None) -> str:
    """Convert a written value to JSON.

    Args:
        written: the text between the tags.
        values: the values that the schema allows; None: the schema does not say.
    """
    if values is None or values.kinds == ALL_KINDS:
        word = _WORDS.get(written.strip()) if values is not None else None
        found = word or (written.strip() if _loaded(written) is not _NO_VALUE else None)
        return found or as_json(written)
    if values.lists(written):
        return as_json(written)
    if values.kinds == {"string"} and all(isinstance(one, str) for one in values.listed.values()):
        return as_json(written)
    return _typed(written, values)


def _typed(written: str, values: Values) -> str:
    spelled = written.strip()
    if _loaded(spelled) is _NO_VALUE:
        spelled = _other_spelling(spelled, values)
    value = _loaded(spelled)
    if value is _NO_VALUE:
        return as_json(written)
    if values.lists(value):
        return spelled
    if "string" not in values.kinds:
        return (
            _whole(spelled, value)
            if values.kinds & {"integer", "number"} == {"integer"}
            else spelled
        )
    # Templates write null, lists and objects as JSON. Any other text could also be a string.
    if kind_of(value) in (_NO_TEXTS | values.first) & values.kinds:
        return spelled
    return as_json(written)


def _other_spelling(written: str, values: Values) -> str:
    """Spell Python's form of a value, or another form of a number, as JSON; else return the text."""
    if written.lower() in ("true", "false") and "boolean" in values.kinds:
        return written.lower()
    if written in _WORDS:
        return _WORDS[written]
    if "string" in values.kinds:
        return written
    if values.kinds & {"integer", "number"} and len(written) <= _MAX_NUMBER:
        if re.fullmatch("[+-]?[0-9]+", written):
            return str(int(written))
        if _NUMBER.fullmatch(written) and math.isfinite(float(written)):
            return repr(float(written))
    return _python_as_json(written)


def _whole(spelled: str, value: Any) -> str:
    """Spell a whole number without a fraction."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return spelled


def _python_as_json(written: str) -> str:
    """Spell lists, tuples and dictionaries of Python as JSON; other texts do not become valid JSON."""
    if written[:1] not in "([{" or len(written) > MAX_PYTHON:
        return written
    return _IN_PYTHON.sub(_piece_as_json, written)


def _piece_as_json(found: re.Match[str]) -> str:
    piece = found.group()
    match found.lastgroup:
        case "text" if len(piece) > 1 and piece[0] == piece[-1]:
            return as_json(_ESCAPE.sub(_unescaped, piece[1:-1]))
        case "text":
            return piece
        case "word":
            return _WORDS[piece]
        case "open":
            return "["
        case "close":
            return "]"
    return ""


def _unescaped(found: re.Match[str]) -> str:
    code = found.group(1)
    if len(code) > 1:
        number = int(code[1:], 16)
        is_character = number < 0x110000 and not 0xD800 <= number < 0xE000
        return chr(number) if is_character else found.group()
    return _ESCAPES.get(code, code if code in "\\'\"/" else found.group())


def _no_constant(name: str) -> Any:
    raise ValueError(name)
