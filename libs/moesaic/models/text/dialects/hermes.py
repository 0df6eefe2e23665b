"""Hermes, and Qwen after it: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

import json
from collections.abc import Sequence

from moesaic.models.text.dialects.call_form import LINE, CallForm
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.json_call import read_json_call
from moesaic.models.text.dialects.reader import Reader, Reading
from moesaic.models.text.dialects.rules import Rules


class Hermes(CallForm):
    """An object of JSON between tags."""

    name = "hermes"
    openings = ("<tool_call>",)
    others = ("</tool_call>",)

    def read_call(self, reader: Reader, functions: Sequence[ToolFunction]) -> Reading[bool]:
        """Read the object and the tag that closes it."""
        if not (yield from read_json_call(reader)):
            return False
        yield from reader.skip_blanks()
        yield from reader.take("</tool_call>")
        return True

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments; the rest is as Qwen's template writes it."""
        head = rules.text(f'<tool_call>\n{{"name": {json.dumps(function.name)}, "arguments": ')
        return f"{head} {rules.arguments(function)} {rules.text('}' + LINE + '</tool_call>')}"
