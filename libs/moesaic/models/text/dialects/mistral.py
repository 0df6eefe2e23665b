"""Mistral: ``[TOOL_CALLS]`` before a list of objects, or, since 2025, before each name, with ``[ARGS]`` after it."""

import json
import secrets
import string
from collections.abc import Sequence

from moesaic.models.text.dialects.call_form import CallForm, read_json_arguments
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.json_call import read_json_call
from moesaic.models.text.dialects.reader import Reader, Reading
from moesaic.models.text.dialects.rules import Rules

_CALLS, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_LETTERS = string.ascii_letters + string.digits


class Mistral(CallForm):
    """A list of objects of JSON. Both forms are read."""

    name = "mistral"
    openings = (_CALLS,)
    others = (_ARGUMENTS, _ID)
    around = (f"{_CALLS}[", "]")
    between = ", "

    def new_id(self) -> str:
        """Make an id of nine letters and digits: the templates refuse others."""
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))

    def read_call(self, reader: Reader, functions: Sequence[ToolFunction]) -> Reading[bool]:
        """Read a list of calls, or a name and arguments."""
        yield from reader.skip_blanks()
        if (yield from reader.next_char()) == "{":
            return (yield from read_json_call(reader))
        if not (yield from reader.take("[")):
            return (yield from _read_named(reader))
        found = False
        while (yield from read_json_call(reader)):
            found = True
            if reader.one_call:
                break
            yield from reader.skip_blanks()
            if not (yield from reader.take(",")):
                break
        if found:
            yield from reader.take("]")
        return found

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments of an object in the list."""
        head = rules.text(f'{{"name": {json.dumps(function.name)}, "arguments": ')
        return f"{head} {rules.arguments(function)} {rules.text('}')}"


class MistralNamed(Mistral):
    """``[TOOL_CALLS]name[ARGS]{...}``, once for each call."""

    name = "mistral_named"
    around = ("", "")
    between = ""

    def call_rule(self, rules: Rules, function: ToolFunction) -> str:
        """Bind the arguments."""
        return f"{rules.text(f'{_CALLS}{function.name}{_ARGUMENTS}')} {rules.arguments(function)}"


def _read_named(reader: Reader) -> Reading[bool]:
    name, end = yield from reader.collect((_ARGUMENTS, _ID, "{", "[TOOL_CALLS]"))
    call_id = ""
    if end == _ID:
        call_id, end = yield from reader.collect((_ARGUMENTS, "{"))
    if end == "{":
        reader.step_back(1)
    if not name.strip() or end not in (_ARGUMENTS, "{"):
        return False
    return (yield from read_json_arguments(reader, name.strip(), call_id.strip()))
