"""Forms with a tag for each argument: Qwen3-Coder's, GLM's, MiniMax'. Arguments are given out as JSON.

A value stands between its tags as it is. The function's schema tells texts from values in JSON.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from moesaic.models.text.dialects.call_form import LINE, CallForm
from moesaic.models.text.dialects.functions import ToolFunction, find
from moesaic.models.text.dialects.json_call import read_json_call
from moesaic.models.text.dialects.reader import Put, Reader, Reading
from moesaic.models.text.dialects.rules import Rules
from moesaic.models.text.dialects.tagged_rules import ArgumentTags, arguments_rule
from moesaic.models.text.dialects.written import GrowingValue, as_json, is_json, json_of
from moesaic.models.text.schemas.reading import STRUCTURES, Values, kind_of

_NAME = re.compile(r"[\w.:/-]{1,256}")


class Tagged(ArgumentTags, CallForm):
    """A form, by its tags."""

    @abstractmethod
    def read_name(self, reader: Reader) -> Reading[str]:
        """Read the name of the function; empty if none comes."""

    def read_end(self, reader: Reader) -> Reading[None]:
        """Read what follows the end of the call."""
        yield from ()

    def read_call(self, reader: Reader, functions: Sequence[ToolFunction]) -> Reading[bool]:
        """Read a name, and the arguments to the end of the call.

        Arguments that break off, or have something else among them, are given out as broken JSON.
        """
        yield from reader.skip_blanks()
        if (yield from reader.next_char()) == "{":
            return (yield from self._read_object(reader))
        name = yield from self.read_name(reader)
        if not _NAME.fullmatch(name):
            return False
        function, given = find(functions, name), dict[str, Any]()
        while True:
            yield from reader.skip_blanks()
            # Models write the closing tag of a value twice.
            if given:
                while (yield from reader.take(self.value_tags[1])):
                    yield from reader.skip_blanks()
            tag = yield from reader.take(self.key_tags[0], self.end, *self.followers)
            if not given and not tag:
                return False
            if not given:
                reader.begin_call(name)
            if tag != self.key_tags[0]:
                break
            before = ", " if given else "{"
            key = yield from self._read_key(reader)
            if key is None:
                reader.put_arguments(before)
                return True
            reader.put_arguments(f"{before}{as_json(key)}: ")
            if not (yield from self._read_value(reader, function, key, given)):
                return True
        if tag in self.followers:
            reader.step_back(len(tag))
        if tag:
            reader.put_arguments("}" if given else "{}")
            yield from self.read_end(reader)
        return True

    def _read_object(self, reader: Reader) -> Reading[bool]:
        """Read a call that is a JSON object: models fall back to the most common form."""
        if not (yield from read_json_call(reader)):
            return False
        yield from reader.skip_blanks()
        yield from reader.take(self.end)
        yield from self.read_end(reader)
        return True

    def _read_key(self, reader: Reader) -> Reading[str | None]:
        """Read the name of an argument, up to its value; the closing tag of the name may be missing."""
        closing, opening = self.key_tags[1], self.value_tags[0]
        key, end = yield from reader.collect((closing, opening) if opening else (closing,))
        if end == closing and opening:
            yield from reader.skip_blanks()
            end = yield from reader.take(opening)
        return _unquoted(key) if end else None

    def _read_value(
        self, reader: Reader, function: ToolFunction, key: str, given: dict[str, Any]
    ) -> Reading[bool]:
        line = (yield from reader.take("\r\n", self.line)) if self.line else ""
        values, pieces = function.argument(key, given), list[str]()
        given[key] = None

        def give(text: str) -> None:
            reader.put_arguments(text)
            # The value decides which of several shapes the call has.
            if len(function.shapes) > 1:
                pieces.append(text)

        may_be_structure = (yield from reader.next_char()) in ("{", "[") and _has_structures(values)
        closed = may_be_structure and (yield from self._read_structure(reader, values, give))
        if not closed:
            value = GrowingValue(give, values)
            closed = yield from self._read_text(
                reader, value, line, lambda name: name not in given and function.may_have(name)
            )
            value.end(closed=closed)
        given[key] = json.loads("".join(pieces)) if closed and pieces else None
        return closed

    def _read_structure(self, reader: Reader, values: Values | None, give: Put) -> Reading[bool]:
        """Read a JSON list or object, whose strings may contain tags; false, and reads nothing, if it is neither."""
        pieces: list[str] = []
        reader.hold()
        if (yield from reader.json_value(pieces.append)):
            written = "".join(pieces)
            yield from reader.skip_blanks()
            if (yield from reader.take(self.value_tags[1])) and is_json(written):
                reader.release()
                give(json_of(written, values))
                return True
        reader.restore()
        return False

    def _read_text(
        self, reader: Reader, value: GrowingValue, line: str, may_come: Callable[[str], bool]
    ) -> Reading[bool]:
        """Read a value to its end; false if it breaks off.

        A value may contain its closing tag, which ends it only before a tag that may follow, or at the text's end.
        If the closing tag is missing, the value ends before the end of the call, or before the opening tag of another
        argument on a line of its own. The function must have that argument, and the call must not have given it yet.
        """
        close = self.value_tags[1]
        markers = (close, self.key_tags[0], *self.ends)
        while marker := (yield from reader.passed(value.put, markers)):
            blanks = reader.blanks_before
            if marker == close:
                if (yield from self._is_closed(reader, blanks)):
                    value.put(blanks.removesuffix(line or self.line))
                    return True
                value.put(blanks + marker)
                continue
            reader.step_back(len(marker))
            reader.hold()
            yield from reader.take(marker)
            if marker == self.key_tags[0]:
                alone = "\n" in blanks or value.is_empty or not value.may_be_text
                name, _ = yield from reader.collect(self.key_tags[1:])
                ends = alone and may_come(name.strip())
            else:
                yield from reader.skip_blanks()
                followed = yield from reader.take(*self.followers)
                ends = bool(followed) or not (yield from reader.next_char())
            reader.restore()
            if ends:
                value.put(blanks[: max(blanks.rfind("\n"), 0)])
                return True
            yield from reader.take(marker)
            value.put(blanks + marker)
        return False

    def _is_closed(self, reader: Reader, blanks: str) -> Reading[bool]:
        """Check the text after the closing tag of a value; ``blanks`` come before the tag."""
        reader.hold()
        yield from reader.skip_blanks()
        again = (self.value_tags[1],) if self.line and "\n" in blanks else ()
        tags = (self.key_tags[0], self.end, *self.followers, *again)
        closed = bool((yield from reader.take(*tags))) or not (yield from reader.next_char())
        reader.restore()
        return closed


class QwenCoder(Tagged):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``."""

    name = "qwen3_coder"
    openings = ("<tool_call>", "<function=")
    others = ("</tool_call>", "</function>", "</parameter>")
    key_tags = ("<parameter=", ">")
    value_tags = ("", "</parameter>")
    line = "\n"
    end = "</function>"
    followers = ("</tool_call>", "<tool_call>", "<function=")

    def read_name(self, reader: Reader) -> Reading[str]:
        """Read it within its tag; the outer tag may be missing."""
        yield from reader.skip_blanks()
        while (yield from reader.take("<tool_call>")):
            yield from reader.skip_blanks()
        yield from reader.take("<function=")
        name, _ = yield from reader.collect((">",))
        return _unquoted(name)

    def read_end(self, reader: Reader) -> Reading[None]:
        """Read the outer tag."""
        yield from reader.skip_blanks()
        yield from reader.take("</tool_call>")

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments."""
        head = rules.text(f"<tool_call>\n<function={function.name}>\n")
        tail = rules.text("</function>\n</tool_call>")
        return f"{head} {arguments_rule(self, rules, function)} {tail}"


class Glm(Tagged):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``."""

    name = "glm45"
    openings = ("<tool_call>",)
    others = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key_tags = ("<arg_key>", "</arg_key>")
    value_tags = ("<arg_value>", "</arg_value>")
    end = "</tool_call>"
    followers = ("<tool_call>",)

    def read_name(self, reader: Reader) -> Reading[str]:
        """Read it up to the first argument, or the end."""
        while (yield from reader.take("<tool_call>")):
            yield from reader.skip_blanks()
        name, end = yield from reader.collect(("<arg_key>", "</tool_call>"))
        reader.step_back(len(end))
        return name.strip()

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments."""
        # GLM-4.5 and 4.6 write line breaks here, later versions do not.
        head = f"{rules.text(f'<tool_call>{function.name}')} {rules.text(LINE)}?"
        tail = rules.text("</tool_call>")
        return f"{head} {arguments_rule(self, rules, function)} {tail}"


class MiniMax(Tagged):
    """``<invoke name="name"><parameter name="key">value</parameter></invoke>``, between tags around all calls."""

    name = "minimax_m2"
    openings = ('<invoke name="',)
    frames = ("<minimax:tool_call>", "</minimax:tool_call>")
    others = ("</invoke>", "</parameter>")
    around = ("<minimax:tool_call>\n", "</minimax:tool_call>")
    between = ""
    key_tags = ('<parameter name="', '">')
    value_tags = ("", "</parameter>")
    end = "</invoke>"
    followers = ("</minimax:tool_call>", '<invoke name="')

    def read_name(self, reader: Reader) -> Reading[str]:
        """Read it within its tag."""
        name, _ = yield from reader.collect(('">',))
        return name.strip()

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments."""
        head, tail = rules.text(f'<invoke name="{function.name}">\n'), rules.text("</invoke>\n")
        return f"{head} {arguments_rule(self, rules, function)} {tail}"


def _unquoted(name: str) -> str:
    """Remove the quotes around a name, which some models write."""
    name = name.strip()
    return name[1:-1] if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'" else name


def _has_structures(values: Values | None) -> bool:
    if values is None:
        return True
    kinds = {*values.kinds, *map(kind_of, values.listed.values())}
    return bool(kinds & STRUCTURES)
