"""A form of tool calls: how a family writes them, and how what it writes is read."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Reader, Reading
from moesaic.models.text.dialects.rules import Rules

LINE = "\n"


class CallForm(ABC):
    """One form.

    Attributes:
        name: name of the form, in settings.
        openings: markers that open a call.
        frames: markers around calls, which say nothing themselves.
        others: markers within calls.
        around: texts before the first call of an answer and after the last one.
        between: text between two calls.
        ends_reasoning: openings and frames also end a reasoning that was not closed.
        many: an answer may have several calls.
    """

    name: ClassVar[str]
    openings: ClassVar[tuple[str, ...]]
    frames: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[tuple[str, ...]] = ()
    around: ClassVar[tuple[str, str]] = ("", "")
    between: ClassVar[str] = LINE
    ends_reasoning: ClassVar[bool] = False
    many: ClassVar[bool] = True

    @property
    def markers(self) -> tuple[str, ...]:
        """All of its markers, which the text of an answer must have."""
        return (*self.openings, *self.frames, *self.others)

    def new_id(self) -> str:
        """Make the id of a call, if the model writes none."""
        return new_id()

    @abstractmethod
    def read_call(self, reader: Reader, functions: Sequence[ToolFunction]) -> Reading[bool]:
        """Read what an opening has opened; false, without a part given out, if that is no call."""

    @abstractmethod
    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Write the rule of a call to one function."""

    def calls_rule(self, rules: Rules, call: str, *, many: bool) -> str:
        """Write the rule of an answer's calls, at least one; ``call`` is the rule of each."""
        more = f"({rules.text(self.between)} {call})*" if many else ""
        before, behind = map(rules.text, self.around)
        return " ".join(part for part in (before, call, more, behind) if part)


def new_id() -> str:
    """Make the id of a call as OpenAI does."""
    return f"call_{secrets.token_hex(12)}"


def read_json_arguments(reader: Reader, name: str, call_id: str = "") -> Reading[bool]:
    """Read a call of which the name is known: its arguments come next, as an object of JSON."""
    yield from reader.skip_blanks()
    if (yield from reader.next_char()) != "{":
        return False
    reader.begin_call(name, call_id)
    yield from reader.json_value(reader.put_arguments)
    yield from reader.skip_blanks()
    return True


def begin_without_arguments(reader: Reader, name: str, call_id: str = "") -> None:
    """Give out a call that says nothing of its arguments."""
    reader.begin_call(name, call_id)
    reader.put_arguments("{}")
