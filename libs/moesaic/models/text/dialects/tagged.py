"""Forms with a tag for each argument: Qwen3-Coder's, GLM's, MiniMax'. What they say is given out as JSON.

A value stands between its tags as it is. The function's schema tells a text from what is to be read as JSON.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moesaic.models.text.dialects.call_form import LINE, CallForm
from moesaic.models.text.dialects.functions import ToolFunction, find
from moesaic.models.text.dialects.reader import Reader, Reading
from moesaic.models.text.dialects.rules import Rules

_NAME = re.compile(r"[\w.:/-]{1,256}")


class Tagged(CallForm):
    """A form, by its tags.

    Attributes:
        key_tags: tags around the name of an argument.
        value_tags: tags around its value; the first one is empty where the name's tag opens the value too.
        line: what stands between these and the value.
        end: closes the call.
    """

    key_tags: ClassVar[tuple[str, str]]
    value_tags: ClassVar[tuple[str, str]]
    line: ClassVar[str] = ""
    end: ClassVar[str]

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
        name = yield from self.read_name(reader)
        if not _NAME.fullmatch(name):
            return False
        function, before = find(functions, name), "{"
        while True:
            yield from reader.skip_blanks()
            tag = yield from reader.take(self.key_tags[0], self.end)
            if before == "{" and not tag:
                return False
            if before == "{":
                reader.begin_call(name)
            if tag != self.key_tags[0]:
                break
            key, end = yield from reader.collect((self.key_tags[1],))
            if end and self.value_tags[0]:
                yield from reader.skip_blanks()
                end = yield from reader.take(self.value_tags[0])
            if not end:
                reader.put_arguments(before)
                return True
            reader.put_arguments(f"{before}{_as_json(key.strip())}: ")
            before = ", "
            if not (yield from self._read_value(reader, function, key.strip())):
                return True
        if tag:
            reader.put_arguments("}" if before == ", " else "{}")
            yield from self.read_end(reader)
        return True

    def _read_value(self, reader: Reader, function: ToolFunction, key: str) -> Reading[bool]:
        if self.line:
            yield from reader.take(self.line)
        close = (self.value_tags[1],)
        if function.is_text(key):
            reader.put_arguments('"')
            if not (
                yield from reader.passed(
                    lambda text: reader.put_arguments(_as_json(text)[1:-1]), close, self.line, 1
                )
            ):
                return False
            reader.put_arguments('"')
            return True
        pieces: list[str] = []
        if not (yield from reader.passed(pieces.append, close, self.line, 1)):
            reader.put_arguments("".join(pieces))
            return False
        reader.put_arguments(_value("".join(pieces), function, key))
        return True

    def arguments_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind each argument, in the order of the schema; of texts only those of a list are bound."""
        required = function.parameters.get("required", ())
        rule = []
        for key, schema in function.properties.items():
            one = self._argument_rule(rules, function, key, schema)
            rule.append(one if key in required else f"({one})?")
        return " ".join(rule)

    def _argument_rule(self, rules: Rules, function: ToolFunction, key: str, schema: Any) -> str:
        head = f"{self.key_tags[0]}{key}{self.key_tags[1]}"
        if self.value_tags[0]:
            head += f"\n{self.value_tags[0]}"
        head, tail = head + self.line, self.line + self.value_tags[1]
        texts = _texts(schema)
        if texts is not None:
            value = f"({' | '.join(map(rules.text, texts))}) {rules.text(tail)}"
        elif function.is_text(key):
            value = rules.free_until(self.value_tags[1], before=self.line)
        else:
            shared = {k: v for k, v in function.parameters.items() if k in ("$defs", "definitions")}
            inner = {**schema, **shared} if isinstance(schema, Mapping) else schema
            value = f"{rules.value(inner)} {rules.text(tail)}"
        return f"{rules.text(head)} {value} {rules.text(LINE)}"


class QwenCoder(Tagged):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``."""

    name = "qwen3_coder"
    openings = ("<tool_call>", "<function=")
    others = ("</tool_call>", "</function>", "</parameter>")
    key_tags = ("<parameter=", ">")
    value_tags = ("", "</parameter>")
    line = "\n"
    end = "</function>"

    def read_name(self, reader: Reader) -> Reading[str]:
        """Read it within its tag; the outer tag may be missing."""
        yield from reader.skip_blanks()
        yield from reader.take("<function=")
        name, _ = yield from reader.collect((">",))
        return name.strip()

    def read_end(self, reader: Reader) -> Reading[None]:
        """Read the outer tag."""
        yield from reader.skip_blanks()
        yield from reader.take("</tool_call>")

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments."""
        head = rules.text(f"<tool_call>\n<function={function.name}>\n")
        tail = rules.text("</function>\n</tool_call>")
        return f"{head} {self.arguments_rule(rules, function)} {tail}"


class Glm(Tagged):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``."""

    name = "glm45"
    openings = ("<tool_call>",)
    others = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key_tags = ("<arg_key>", "</arg_key>")
    value_tags = ("<arg_value>", "</arg_value>")
    end = "</tool_call>"

    def read_name(self, reader: Reader) -> Reading[str]:
        """Read it up to the first argument, or the end."""
        name, end = yield from reader.collect(("<arg_key>", "</tool_call>"))
        reader.step_back(len(end))
        return name.strip()

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments."""
        head, tail = rules.text(f"<tool_call>{function.name}\n"), rules.text("</tool_call>")
        return f"{head} {self.arguments_rule(rules, function)} {tail}"


class MiniMax(Tagged):
    """``<invoke name="name"><parameter name="key">value</parameter></invoke>``, between tags around all calls."""

    name = "minimax_m2"
    openings = ('<invoke name="',)
    frames = ("<minimax:tool_call>", "</minimax:tool_call>")
    others = ("</invoke>", "</parameter>")
    key_tags = ('<parameter name="', '">')
    value_tags = ("", "</parameter>")
    end = "</invoke>"

    def read_name(self, reader: Reader) -> Reading[str]:
        """Read it within its tag."""
        name, _ = yield from reader.collect(('">',))
        return name.strip()

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments."""
        head, tail = rules.text(f'<invoke name="{function.name}">\n'), rules.text("</invoke>\n")
        return f"{head} {self.arguments_rule(rules, function)} {tail}"

    def calls_rule(self, rules: Rules, call: str, *, many: bool) -> str:
        """Write the calls between the tags of all."""
        calls = f"{call}+" if many else call
        head, tail = rules.text("<minimax:tool_call>\n"), rules.text("</minimax:tool_call>")
        return f"{head} {calls} {tail}"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _value(written: str, function: ToolFunction, key: str) -> str:
    """Read a value that may be JSON; else it is a text."""
    try:
        value = json.loads(written, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _as_json(written)
    if value is not None and function.may_be_text(key):
        return _as_json(written)
    return written.strip()


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _texts(schema: Any) -> list[str] | None:
    """Find the texts that a schema allows, if it lists them."""
    if not isinstance(schema, Mapping):
        return None
    texts = [schema["const"]] if "const" in schema else schema.get("enum")
    listed = isinstance(texts, list) and bool(texts) and all(isinstance(t, str) for t in texts)
    return list(texts) if listed and isinstance(texts, list) else None
