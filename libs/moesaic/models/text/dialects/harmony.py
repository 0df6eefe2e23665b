"""Harmony, of gpt-oss: messages on channels; a call is a message to ``functions.name``.

A message is ``<|start|>assistant<|channel|>name to=recipient <|constrain|>json<|message|>text<|end|>``, and the prompt
has the first ``<|start|>assistant``. Analysis is reasoning; commentary to nobody, and final, are for the reader.
"""

import re
from collections.abc import Sequence
from functools import partial

from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Kind, Reader, Reading
from moesaic.models.text.dialects.rules import FREE, Rules

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."
_ENDS = (_END, _CALL, _RETURN, _START)
MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN)


def read_harmony(reader: Reader, functions: Sequence[ToolFunction]) -> Reading[None]:
    """Read messages to the end; text outside messages is content, and so are calls without tools."""
    known = {function.name for function in functions}
    last: Kind | None = None
    while True:
        reader.hold()
        if not (yield from reader.next_char()):
            return
        header, end = yield from reader.collect((_MESSAGE,))
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        if not end or (channel is None and recipient is None):
            reader.restore()
            yield from reader.passed(partial(reader.emit, "content"), _ENDS, "")
            last = "content"
            continue
        reader.release()
        to = recipient.group(1) if recipient else ""
        # Models leave out the prefix of a function's name.
        if functions and (to.startswith(_FUNCTIONS) or to in known):
            yield from _read_call(reader, to.removeprefix(_FUNCTIONS))
            if reader.one_call:
                return
            continue
        thinks = channel is not None and channel.group(1) == "analysis"
        thinks |= bool(to) and not to.startswith(_FUNCTIONS)
        kind: Kind = "reasoning" if thinks else "content"
        if kind == last:
            reader.emit(kind, "\n\n")
        last, reader.reasoning = kind, thinks
        yield from reader.passed(partial(reader.emit, kind), _ENDS, "")
        reader.reasoning = False


def _read_call(reader: Reader, name: str) -> Reading[None]:
    reader.begin_call(name)
    yield from reader.skip_blanks()
    if (yield from reader.take(*_ENDS)) or not (yield from reader.next_char()):
        reader.put_arguments("{}")
        return
    yield from reader.passed(reader.put_arguments, _ENDS)


def thinking_rule(rules: Rules) -> str:
    """Write the rule of messages before the answer: thoughts, and words to the reader."""
    channel = f"({rules.text('analysis')} | {rules.text('commentary')})"
    head, middle = rules.text(_CHANNEL), rules.text(_MESSAGE)
    tail = rules.text(f"{_END}{_START}assistant")
    return f"({head} {channel} {middle} {rules.add(FREE)} {tail})*"


def call_rule(rules: Rules, function: ToolFunction) -> str:
    """Write the rule of a call; the recipient stands before the channel or after it."""
    to = f" to={_FUNCTIONS}{function.name}"
    first = rules.text(f"{to}{_CHANNEL}commentary ")
    second = rules.text(f"{_CHANNEL}commentary{to} ")
    json_follows = rules.text(f"{_CONSTRAIN}json{_MESSAGE}")
    return f"({first} | {second}) {json_follows} {rules.arguments(function)}"


def final_rule(rules: Rules, body: str) -> str:
    """Write the rule of the last message, around its text."""
    head, middle = rules.text(f"{_CHANNEL}final"), rules.text(_MESSAGE)
    constrained = rules.text(f" {_CONSTRAIN}json")
    return f"{head} ({constrained})? {middle} {body}"
