"""Grammars in Lark's notation, as ``llguidance`` reads it, with a model's own markers in them.

Where a marker is a token of its own, free text cannot have it, and the token's id names it. Where it is spelled, free
text ends lazily at it.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.schemas.binding import TooLong
from moesaic.models.text.schemas.raw_texts import ANY, escaped, slashes_escaped

# JSON lets any run of blanks stand between two tokens, and small models get lost in them until their answer is
# full. One blank, or a new line with its indent, is enough for every usual layout of an answer. Arguments of calls
# need no layout, and templates write them on one line, so they have at most one blank.
BLANKS = {"whitespace_pattern": r"( |\n {0,40})?"}
ONE_BLANK = {"whitespace_pattern": " ?"}
FREE = "/(?s:.*)/"
MAX_CHARACTERS = 200_000  # of a grammar


class Rules:
    """A grammar that is being written.

    Args:
        token_id: id of the token that the whole text is; None: it is no single token.
        markers: texts that may be tokens.
    """

    def __init__(self, token_id: Callable[[str], int | None], markers: tuple[str, ...]) -> None:
        self._ids = {m: i for m in markers if (i := token_id(m)) is not None}
        self._lines: list[str] = []
        self._left = MAX_CHARACTERS
        self._terminals: dict[tuple[str, bool], str] = {}
        self.lead = ""  # stands already where a text begins with it
        self.unenforced: dict[str, set[str]] = {}  # keywords that are not enforced, by function

    def is_token(self, marker: str) -> bool:
        """True if a marker is a single token."""
        return marker in self._ids

    def add(self, body: str, options: str = "") -> str:
        """Add a rule; gives its name.

        Raises:
            TooLong: the grammar has no room for it.
        """
        name = f"r{len(self._lines)}"
        self._put(f"{name}{options}: {body}")
        return name

    def _put(self, line: str) -> None:
        self._left -= len(line)
        if self._left < 0:
            raise TooLong
        self._lines.append(line)

    def text(self, text: str) -> str:
        """Write a literal text, with its markers as tokens if they are tokens."""
        parts = [text.removeprefix(self.lead)]
        for marker in self._ids:
            parts = [
                piece
                for part in parts
                for piece in (_around(part, marker) if part not in self._ids else [part])
            ]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else _quoted(part)
            for part in parts
            if part
        )

    def free_until(self, marker: str) -> str:
        """Write free text up to a marker, and that marker."""
        if marker in self._ids:
            return f"({self.add(FREE)} {self.text(marker)})"
        return f"({self.add(FREE, f'[suffix={_quoted(marker)}]')})"

    def terminal(self, body: str, *, lazy: bool = False) -> str:
        """Add a terminal of regular expressions; returns its name. Equal ones share a name, since each is expensive.

        A lazy terminal ends as soon as it matches.
        """
        if (body, lazy) not in self._terminals:
            name = f"T{len(self._lines)}"
            self._put(f"{name}: {body}")
            self._terminals[body, lazy] = self.add(name, "[lazy]") if lazy else name
        return self._terminals[body, lazy]

    def text_until(
        self, marker: str, expressions: Sequence[str], never: Sequence[str], before: str
    ) -> str:
        """Write the rule of a text, of ``before``, and of the marker that ends it.

        Args:
            marker: ends the text.
            expressions: regular expressions, all of which the text matches.
            never: regular expressions, none of which the text with ``before`` matches.
            before: the characters right before the marker.
        """
        is_token = marker in self._ids
        # Without expressions the text may contain ``before``, so the rule need not name it.
        end = (before if expressions else "") if is_token else before + marker
        parts = [f"/{slashes_escaped(one + escaped(end))}/" for one in expressions or [ANY]]
        never = never if is_token else [*never, f"{ANY}{escaped(marker)}(?s:.+)"]
        parts += [f"~/{slashes_escaped(one)}/" for one in never]
        name = self.terminal(" & ".join(parts), lazy=not is_token)
        return f"{name} {self.text(marker)}" if is_token else name

    def value(self, schema: Any) -> str:
        """Write the rule of a JSON value in a call."""
        return self.add(f"%json {schema_text(schema, ONE_BLANK)}")

    def arguments(self, function: ToolFunction) -> str:
        """Write the arguments of a function, as an object of JSON; a strict one has no others than its schema."""
        if not function.strict:
            return self.value({"type": "object"})
        bound, unenforced = function.bound
        self.leave_out(function, unenforced)
        return self.value(bound)

    def leave_out(self, function: ToolFunction, keywords: Set[str]) -> None:
        """Note keywords of a function's schema that the grammar does not enforce."""
        if keywords:
            self.unenforced.setdefault(function.name, set()).update(keywords)

    def whole(self, start: str) -> str:
        """Write the grammar down; it begins with ``start``."""
        return "\n".join([f"start: {start}", *self._lines, ""])


def schema_text(schema: Any, blanks: Mapping[str, str] = BLANKS) -> str:
    """Write a schema as text, without a way to write blanks for ever."""
    if isinstance(schema, Mapping):
        schema = {"x-guidance": blanks, **schema}
    return json.dumps(schema)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _around(text: str, marker: str) -> list[str]:
    pieces = text.split(marker)
    return [piece for each in pieces for piece in (marker, each)][1:]
