"""Kimi-K2: tokens as in DeepSeek's form, and each call has an id of the model's, ``functions.name:0``."""

import re
from collections.abc import Sequence

from moesaic.models.text.dialects.call_form import (
    CallForm,
    begin_without_arguments,
    read_json_arguments,
)
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Reader, Reading
from moesaic.models.text.dialects.rules import Rules

_BEGIN, _END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ALL_BEGIN, _ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Kimi(CallForm):
    """``<begin>functions.name:0<arguments>{...}<end>``; the id goes to the caller, since the template wants it back."""

    name = "kimi_k2"
    openings = (_BEGIN,)
    frames = (_ALL_BEGIN, _ALL_END)
    others = (_ARGUMENTS, _END)
    around = frames
    between = ""
    ends_reasoning = True

    def read_call(self, reader: Reader, functions: Sequence[ToolFunction]) -> Reading[bool]:
        """Read the id with the name in it, the arguments, and the end of the call."""
        call_id, end = yield from reader.collect((_ARGUMENTS, _END))
        call_id = call_id.strip()
        found = _ID.fullmatch(call_id)
        if not end or found is None:
            return False
        name = found.group(1)
        yield from reader.skip_blanks()
        if end == _END or (yield from reader.take(_END)):
            begin_without_arguments(reader, name, call_id)
            return True
        if not (yield from read_json_arguments(reader, name, call_id)):
            return False
        yield from reader.take(_END)
        return True

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments; the model numbers its calls."""
        head, middle = rules.text(f"{_BEGIN}functions.{function.name}:"), rules.text(_ARGUMENTS)
        number = rules.add("/[0-9]{1,3}/")
        return f"{head} {number} {middle} {rules.arguments(function)} {rules.text(_END)}"
