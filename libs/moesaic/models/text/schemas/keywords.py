"""Keywords of JSON Schema, and the effect of each on grammars. The reference page is made from this table."""

import re
from typing import Any, Literal, NamedTuple

Effect = Literal["enforced", "ignored", "unenforced"]


class Keyword(NamedTuple):
    """One keyword.

    Attributes:
        effect: ``ignored`` does not restrict values; ``unenforced`` does, but no grammar can enforce it.
        note: further information for callers.
    """

    effect: Effect
    note: str = ""


def _all(effect: Effect, names: str) -> dict[str, Keyword]:
    return dict.fromkeys(names.split(), Keyword(effect))


DISJOINT = "read as `anyOf`; unenforced if a value may fit two of its schemas"
KEYWORDS: dict[str, Keyword] = {
    **_all("enforced", "type enum const anyOf allOf properties required items prefixItems"),
    **_all("enforced", "minimum maximum multipleOf minItems maxItems minLength maxLength"),
    **_all("enforced", "exclusiveMinimum exclusiveMaximum $defs definitions $anchor $id"),
    "oneOf": Keyword("enforced", DISJOINT),
    "$ref": Keyword("enforced", "within the schema; unenforced if it points outside"),
    "$dynamicRef": Keyword("enforced", "as `$ref`"),
    "$recursiveRef": Keyword("enforced", "as `$ref`"),
    "$dynamicAnchor": Keyword("enforced", "as `$anchor`"),
    "additionalProperties": Keyword("enforced", "default at the root of a function: `false`"),
    "patternProperties": Keyword("enforced", "unenforced if a name may fit two patterns"),
    "minProperties": Keyword("enforced", "unenforced beside optional properties"),
    "maxProperties": Keyword("enforced", "unenforced beside optional properties"),
    "additionalItems": Keyword("enforced", "after a list of `items`, as in draft 7"),
    **dict.fromkeys(
        ("minimum", "exclusiveMinimum"), Keyword("enforced", "unenforced below -10^18")
    ),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), Keyword("enforced", "unenforced above 10^18")),
    "nullable": Keyword("enforced", "of OpenAPI: also allows `null`"),
    "pattern": Keyword("enforced", "unenforced with look-arounds, back references, `\\b`"),
    "format": Keyword("enforced", "see the second table"),
    **_all("ignored", "title description default examples example deprecated readOnly writeOnly"),
    **_all("ignored", "$schema $comment $vocabulary $recursiveAnchor id contentEncoding"),
    **_all("ignored", "contentMediaType contentSchema discriminator xml externalDocs"),
    "uniqueItems": Keyword("unenforced", "`false` is ignored"),
    "if": Keyword("unenforced", "ignored without `then` and `else`"),
    **_all("unenforced", "then else not propertyNames contains minContains maxContains"),
    **_all("unenforced", "dependentRequired dependentSchemas dependencies"),
    **_all("unenforced", "unevaluatedProperties unevaluatedItems"),
}
"""All keywords of drafts 4 to 2020-12 and of OpenAPI; any other name is ignored."""

_KNOWN_FORMATS = "date-time time date duration email hostname ipv4 ipv6 uri uuid"
_OTHER_FORMATS = (
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer "
    "relative-json-pointer regex"
)
FORMATS: dict[str, Keyword] = {
    **_all("enforced", _KNOWN_FORMATS),
    **_all("unenforced", _OTHER_FORMATS),
}
"""Formats of JSON Schema; any other name is ignored, as in the specification."""

# The common part of JSON Schema's regular expressions and those of the grammar library.
_ESCAPED = r"\\(?:[dDwWsStnrfv]|[^\w\s]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{\w+\})"
_TOKEN = re.compile(
    rf"""
    (?P<atom>{_ESCAPED} | \[(?:\^(?!\])|(?!\^))(?:{_ESCAPED}|(?!&&|~~|--)[^\[\]\\])+\] | [^\\\[\](){{}}^$*+?|])
    | (?P<open>\((?:\?(?::|P?<[A-Za-z_]\w*>))?)
    | (?P<close>\))
    | (?P<often>(?:[*+?]|\{{\d{{1,4}}(?:,\d{{0,4}})?\}})\??)
    | (?P<begin>\^) | (?P<end>\$(?![^)|$])) | (?P<bar>\|)
    """,
    re.VERBOSE,
)
_SETS = re.compile(r"\\.|\[(?:\\.|[^\\\]])*\]", re.DOTALL)
_IN_SET = re.compile(r"\\([dw])(-(?!\]))?")
_ASCII = {"d": "0-9", "w": "A-Za-z0-9_"}
_NEEDS = {"often": ("atom", "close"), "begin": ("", "open", "begin", "bar")}


def is_plain_pattern(pattern: Any) -> bool:
    """True if a grammar can enforce a regular expression."""
    if not isinstance(pattern, str):
        return False
    at = depth = 0
    before = ""
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        kind = (found.lastgroup or "") if found else ""
        if found is None or before not in _NEEDS.get(kind, (before,)):
            return False
        depth += (kind == "open") - (kind == "close")
        if depth < 0:
            return False
        at, before = found.end(), kind
    return not depth


def narrowed(pattern: str) -> str:
    r"""Write ``\d`` and ``\w`` as ASCII characters, which is their meaning in JSON Schema."""
    return _SETS.sub(_narrowed_piece, pattern)


def _narrowed_piece(found: re.Match[str]) -> str:
    piece = found.group()
    if piece[0] == "\\":
        return f"[{_ASCII[piece[1]]}]" if piece[1] in _ASCII else piece
    # Negated sets, and sets with \W or \D, keep their Unicode meaning.
    if piece.startswith("[^") or "\\W" in piece or "\\D" in piece:
        return piece
    return _IN_SET.sub(_narrowed_member, piece)


def _narrowed_member(found: re.Match[str]) -> str:
    return _ASCII[found[1]] + (r"\-" if found[2] else "")
