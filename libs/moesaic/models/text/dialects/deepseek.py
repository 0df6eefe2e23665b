"""DeepSeek: tokens around each call and around all of them; V3 and R1 fence the arguments, V3.1 does not."""

from collections.abc import Sequence

from moesaic.models.text.dialects.call_form import (
    LINE,
    CallForm,
    begin_without_arguments,
    read_json_arguments,
)
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Reader, Reading
from moesaic.models.text.dialects.rules import Rules

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BETWEEN = "<｜tool▁sep｜>"
_FENCE = "```"


class DeepSeekV31(CallForm):
    """``<begin>name<sep>{...}<end>``. V3's form is read as well."""

    name = "deepseek_v31"
    openings = (_BEGIN,)
    frames = (_ALL_BEGIN, _ALL_END)
    others = (_BETWEEN, _END)
    around = frames
    between = ""

    def read_call(self, reader: Reader, functions: Sequence[ToolFunction]) -> Reading[bool]:
        """Read the name, the arguments, fenced or not, and the end of the call."""
        name, end = yield from reader.collect((_BETWEEN,))
        name = name.strip()
        # V3 says what it calls.
        if name == "function":
            name, end = yield from reader.collect(("\n", _END))
            name = name.strip()
        if not end or not name:
            return False
        if end != _END:
            yield from reader.skip_blanks()
            if (yield from reader.take(_FENCE)):
                yield from reader.take("json")
        if end == _END or (yield from reader.take(_END)):
            begin_without_arguments(reader, name)
            return True
        if not (yield from read_json_arguments(reader, name)):
            return False
        if (yield from reader.take(_FENCE)):
            yield from reader.skip_blanks()
        yield from reader.take(_END)
        return True

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments."""
        head = rules.text(f"{_BEGIN}{function.name}{_BETWEEN}")
        return f"{head} {rules.arguments(function)} {rules.text(_END)}"


class DeepSeekV3(DeepSeekV31):
    """``<begin>function<sep>name``, then the arguments in a fence."""

    name = "deepseek_v3"
    between = LINE

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments within the fence."""
        head = rules.text(f"{_BEGIN}function{_BETWEEN}{function.name}\n{_FENCE}json\n")
        return f"{head} {rules.arguments(function)} {rules.text(LINE + _FENCE + _END)}"
