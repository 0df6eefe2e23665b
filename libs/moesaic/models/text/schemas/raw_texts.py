"""Regular expressions that enforce schemas of strings that are written without quotes between tags."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moesaic.models.text.schemas.keywords import FORMATS, is_plain_pattern, narrowed

MAX_LENGTH = 2000  # the largest count in an expression
ANY = "(?s:.*)"
# Not a list, an object or a string of JSON.
NO_JSON = r'\s*(?:[^\s"\[{](?s:.*))?'
# Texts that are read as a number or a boolean.
SCALAR = r"\s*(?:[+\-]?[0-9.][0-9.eE+\-]*|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|null|None)\s*"
_DATE = r"\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1\d|2[0-8])"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,6}}"
_DAYS = r"(?:\d{1,4}D|\d{1,4}M(?:\d{1,4}D)?|\d{1,4}Y(?:\d{1,4}M(?:\d{1,4}D)?)?)"
_HOURS = r"T(?:\d{1,4}S|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?)"
_FOUR = "[0-9a-fA-F]{1,4}"
_SHORTER = "|".join(
    f"(?:{_FOUR}:){{{before}}}(?::{_FOUR}){{1,{7 - before}}}" for before in range(1, 7)
)
_FORMATS = {
    "duration": rf"P(?:\d{{1,4}}W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "ipv6": rf"(?:(?:{_FOUR}:){{7}}{_FOUR}|{_SHORTER}|(?:{_FOUR}:){{1,7}}:|::(?:(?:{_FOUR}:){{0,6}}{_FOUR})?)",
    "date": rf"(?:{_DATE}|\d{{4}}-(?:0[13-9]|1[0-2])-(?:29|30)|\d{{4}}-(?:0[13578]|1[02])-31)",
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "hostname": _HOST,
    "email": rf"[a-zA-Z0-9_+-]{{1,40}}(?:\.[a-zA-Z0-9_+-]{{1,40}}){{0,4}}@{_HOST}",
    "uri": r"[a-zA-Z][a-zA-Z0-9+.-]*:[a-zA-Z0-9._~:/?#@!$&'()*+,;=%-]+",
}
_HIDDEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])+\]", re.DOTALL)
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$&~-]")
_SLASHES = re.compile(r"\\.|/")


def expressions_of(conditions: Sequence[Mapping[str, Any]]) -> tuple[list[str], set[str]]:
    """Write regular expressions for a whole text.

    Returns:
        The expressions, all of which it must match, and the keywords that they do not enforce.
    """
    found: list[str] = []
    unenforced: set[str] = set()
    for each in conditions:
        for name, expression in _expressions(each):
            if expression is None:
                unenforced.add(name)
            else:
                found.append(f"(?:{expression})")
    return found, unenforced


def _expressions(keywords: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    if "pattern" in keywords:
        yield "pattern", whole_pattern(keywords["pattern"])
    form = keywords.get("format")
    if isinstance(form, str) and form in FORMATS:
        yield "format", narrowed(_FORMATS[form]) if form in _FORMATS else None
    for name, counted in (("minLength", "{%d,}"), ("maxLength", "{0,%d}")):
        if name in keywords:
            length = keywords[name]
            held = isinstance(length, (int, float)) and 0 <= length <= MAX_LENGTH
            yield name, f"(?s:.){counted % length}" if held else None


def whole_pattern(pattern: Any) -> str | None:
    """Write a pattern, which may match a part of a text, so that it matches all of it; None: it cannot be written."""
    if not is_plain_pattern(pattern):
        return None
    shown = _HIDDEN.sub("_", pattern)
    begins, ends = shown.startswith("^"), shown.endswith("$")
    inner = shown[begins : len(shown) - ends]
    if "^" in inner or "$" in inner:
        return None
    if (begins or ends) and _has_ways(inner):
        return None
    core = narrowed(pattern[begins : len(pattern) - ends])
    return f"{'' if begins else ANY}(?:{core}){'' if ends else ANY}"


def _has_ways(shown: str) -> bool:
    """True if a pattern has a bar outside its groups."""
    depth = 0
    for character in shown:
        depth += (character == "(") - (character == ")")
        if character == "|" and not depth:
            return True
    return False


def escaped(text: str) -> str:
    """Escape a text, so that the expression matches exactly it."""
    return _SPECIAL.sub(r"\\\g<0>", text)


def slashes_escaped(pattern: str) -> str:
    """Escape slashes and line breaks of a pattern, as the grammar needs them."""
    on_one_line = pattern.replace("\n", r"\n")
    return _SLASHES.sub(lambda found: "\\/" if found[0] == "/" else found[0], on_one_line)
