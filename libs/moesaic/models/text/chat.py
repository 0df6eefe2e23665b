"""Chat templates, which turn messages into the text form that the model was trained on. Needs no torch.

A template takes messages in forms that are found by trying it:

| Part of a message | Forms |
|---|---|
| content | a text, or a list of parts |
| calls | see ``call_messages`` |

A template gets the client's own form if it can read that, as in ``transformers``.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from moesaic.errors import CheckpointError, InvalidInput
from moesaic.models.configuration.tokenizer_files import read_special_tokens
from moesaic.models.text.call_messages import CALL_FORMS, PROBE, TOOL, CallMessages
from moesaic.models.text.program import Program, TemplateRefusal
from moesaic.models.text.template_files import DEFAULT, TOOL_USE, read_templates

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of one field of messages; the first one in a message is used."""

Message = Mapping[str, Any]
_Form = Literal["text", "parts"]
_FIRST, _SECOND = "probe_first", "probe_second"
_ASKED: Message = {"role": "user", "content": "probe"}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
_NO_FUNCTION: dict[str, Any] = {"description": "", "parameters": _NO_PARAMETERS}
_PYTHON = "{'type'"  # a list in Python's notation
Messages = Sequence[Mapping[str, Any]]
_ALWAYS: dict[str, Any] = {"tools": None, "documents": None}
# A private character that no text has. A template that strips blanks removes only the blank after it.
_MARK = "\U0010fff0 "


class MessageForms:
    """The forms that one template takes. Safe to use from several threads."""

    def __init__(self, render: Callable[..., str]) -> None:
        """Take ``render``, which renders messages in the form they have."""
        self._render = render
        self._takes = functools.cache(self._found)

    @functools.cached_property
    def call_form(self) -> CallMessages:
        """The form of messages with tool calls."""
        return next((form for form in CALL_FORMS if form.fits(self._render)), CALL_FORMS[0])

    def of(self, messages: Sequence[Message], *, tools: bool) -> list[Message]:
        """Give messages the form that the template takes; each call in them has its arguments as a text.

        Raises:
            InvalidInput: a call's arguments are too large or too deep, or rendering takes too much.
        """
        told = [self._with_content(message, tools) for message in messages]
        return self.call_form.of(told) if any(m.get("tool_calls") for m in told) else told

    def plainest(self, messages: Sequence[Message]) -> list[Message]:
        """Put messages in the form that every template can read: each has a string as content, also beside calls."""
        return [_plain(message) for message in messages]

    def _with_content(self, message: Message, tools: bool) -> Message:
        content = message.get("content")
        if content in (None, ""):
            return message
        list_as, text_as = self._takes(message["role"], tools)
        if isinstance(content, list):
            return message if list_as == "parts" else {**message, "content": joined(content)}
        return message if text_as == "text" else {**message, "content": [_part(content)]}

    def _found(self, role: str, tools: bool) -> tuple[_Form, _Form]:
        """Find how the template takes the content of a role: as a list of parts, and as a string."""
        text = self._tried(role, _FIRST, tools)
        parts = self._tried(role, [_part(_FIRST), _part(_SECOND)], tools)
        if text is None and parts is None and role != "user":
            return self._takes("user", tools)
        text, parts = text or "", parts or _PYTHON
        if _PYTHON in parts:
            return "text", "text"
        if _FIRST not in text:
            return "parts", "parts" if _FIRST in parts else "text"
        return "parts" if _FIRST in parts and _SECOND in parts else "text", "text"

    def _tried(self, role: str, content: Any, tools: bool) -> str | None:
        """Render a conversation with a message of a role; None: the template refuses it."""
        message = {"role": role, "content": content}
        turns: list[Message] = [message, _ASKED]
        if role == "user":
            turns = [message]
        elif role == "assistant":
            turns = [_ASKED, message, _ASKED]
        elif role == "tool":
            *before, result = PROBE
            turns = [*self.call_form.of(before), {**result, "content": content}]
        kwargs = {"tools": [TOOL]} if tools else {}
        try:
            return self._render(turns, **kwargs)
        except TemplateRefusal:
            return None


def joined(parts: Sequence[Mapping[str, Any]]) -> str:
    """Join parts to one text, each on a new line."""
    return "\n".join(part["text"] for part in parts)


def whole_tools(tools: Any) -> Any:
    """Add the optional fields of functions, for templates that read them without a check."""
    if not isinstance(tools, list):
        return tools
    return [_whole_tool(tool) if isinstance(tool, Mapping) else tool for tool in tools]


def _whole_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    told = {**_NO_FUNCTION, **{k: value for k, value in function.items() if value is not None}}
    parameters = told["parameters"]
    if isinstance(parameters, Mapping):
        told["parameters"] = {**_NO_PARAMETERS, **parameters}
    return {**tool, "function": told}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _plain(message: Message) -> Message:
    content = message.get("content") or ""
    told = {**message, "content": joined(content) if isinstance(content, list) else content}
    if told["content"] and told.get("tool_calls"):
        # The template of gpt-oss refuses both fields together.
        told.pop("thinking", None)
    return told


class ChatTemplate:
    """The chat template of one model directory. Safe to use from several threads.

    Some models have a second one, for conversations with tools.

    Attributes:
        source: the text of the templates.
        special: texts of special tokens, such as ``bos_token``, which templates know as variables.
        variables: names of variables that they read, such as ``tools``.
        words: fields and strings that they name, such as ``content``.
    """

    def __init__(
        self, source: str | None, special: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """Take the parts; ``load`` reads them.

        Args:
            source: text of the template for conversations without tools, if there is one.
            special: texts of special tokens, such as ``bos_token``.
            tool_use: text of the template for conversations with tools; None: the same.

        Raises:
            ValueError: one is not a valid template.
            NotReady: the helper process was ended or stopped from outside.
        """
        self.special = dict(special)
        self._plain = None if source is None else Program(source)
        self._tool_use = self._plain if tool_use is None else Program(tool_use)
        programs = [program for program in {self._plain, self._tool_use} if program is not None]
        self.source = "\n".join(program.source for program in programs)
        self.variables = frozenset[str]().union(*(program.variables for program in programs))
        self.words = frozenset[str]().union(*(program.words for program in programs))

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """Read the files that ``template_files`` names.

        Raises:
            InvalidInput: the model has no chat template.
            CheckpointError: a template is not valid Jinja, or a file is invalid.
            NotReady: the helper process was ended or stopped from outside.
        """
        found = read_templates(directory)
        used = {name: found[name] for name in (DEFAULT, TOOL_USE) if name in found}
        if found and not used:
            fix = f"has chat templates named {', '.join(sorted(found))}, and none is the default"
            raise InvalidInput("messages", f"this model {fix}; send a prompt instead")
        if not used:
            raise InvalidInput("messages", "this model has no chat template; send a prompt instead")
        special = read_special_tokens(directory)
        sources = [used.get(name, (None, None))[1] for name in (DEFAULT, TOOL_USE)]
        try:
            return cls(sources[0], special, sources[1])
        except ValueError as error:
            file = next(iter(used.values()))[0]
            raise CheckpointError(file, f"the chat template is invalid: {error}") from error

    def ignored(self, kwargs: Mapping[str, Any], *, tools: bool = False) -> list[str]:
        """List the keywords without effect: the template does not read them, or they are special tokens."""
        program = self._tool_use if tools else self._plain
        known = (program.variables if program else frozenset()) - self.special.keys()
        return [name for name in kwargs if name not in known]

    def render(
        self, /, messages: Messages, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Render a conversation to text, as ``transformers`` does. This waits for another process.

        Args:
            messages: ``role`` and ``content`` of each turn, and other fields that the template knows;
                values are those that JSON can hold.
            add_generation_prompt: end with the text that opens the model's answer.
            kwargs: variables for the template, such as ``tools``; it gets only those that it reads.

        Raises:
            InvalidInput: the template refuses the messages, the text is too long, or rendering it takes
                too much.
            NotReady: the helper process was ended or stopped from outside.
        """
        return self._render([_normal(m) for m in messages], add_generation_prompt, kwargs)

    def write(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
        change: Callable[[str], str] = str,
        *,
        continues: bool = False,
    ) -> str:
        """Render a client's conversation in the form that the template takes.

        If the template refuses that form, the tools are put in their plainest form, and then the messages too.

        Args:
            messages: messages for ``render``; each call in them has its arguments as a text.
            add_generation_prompt, kwargs: as ``render`` takes them.
            change: applied to every string of the messages and the keywords.
            continues: end with the last message's text, so that the model continues it.

        Raises:
            InvalidInput: as ``render``; a call's arguments are too large or too deep; or the last message cannot be
                continued.
            NotReady: the helper process was ended or stopped from outside.
        """
        with_tools = kwargs.get("tools") is not None
        told = self._forms.of([_normal(message) for message in messages], tools=with_tools)
        keywords = with_texts(kwargs, change)

        def rendered(messages: Messages, keywords: Mapping[str, Any]) -> str:
            messages = with_texts(messages, change)
            if not continues:
                return self._render(messages, add_generation_prompt, keywords)
            text = self._render(_marked(messages), add_generation_prompt, keywords)
            return _up_to_mark(text, last_text(messages))

        plain = {**keywords, "tools": whole_tools(keywords["tools"])} if with_tools else keywords
        ways = [(told, keywords), (told, plain), (self._forms.plainest(told), plain)]
        refusal: TemplateRefusal | None = None
        for number, way in enumerate(ways):
            if way in ways[:number]:
                continue
            try:
                return rendered(*way)
            except TemplateRefusal as error:
                refusal = error
        assert refusal is not None
        raise refusal

    @functools.cached_property
    def _forms(self) -> MessageForms:
        def render(messages: Messages, add_generation_prompt: bool = True, **kwargs: Any) -> str:
            return self._render(messages, add_generation_prompt, kwargs)

        return MessageForms(render)

    def _render(
        self, messages: Messages, add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        program = self._plain if kwargs.get("tools") is None else self._tool_use
        if program is None:
            fix = "this model's only chat template is for conversations with tools: send tools"
            raise InvalidInput("messages", fix)
        asked = {name: value for name, value in kwargs.items() if name in program.variables}
        variables = {
            **_ALWAYS,
            **self.special,
            **asked,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        return program.render(variables)


def last_text(messages: Messages) -> str:
    """Find the text of the last message that a model can continue; of several parts, the last one.

    Raises:
        InvalidInput: it has none.
    """
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        content = content[-1]["text"]
    if not isinstance(content, str):
        raise InvalidInput("continue_final_message", "needs a last message that has a text")
    return content


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change every text in a JSON value, the names of fields too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): with_texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    return value


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out null fields, and give reasoning under both names that ``transformers`` gives it."""
    told = {name: value for name, value in message.items() if value is not None}
    reasoning = next((told[name] for name in REASONING_FIELDS if name in told), None)
    if reasoning is None:
        return told
    return {"thinking": reasoning, **told, "reasoning_content": reasoning}


def _marked(messages: Messages) -> Messages:
    """Mark the end of the last message's text."""
    *before, last = messages
    marked = last_text(messages) + _MARK
    if isinstance(last["content"], str):
        return [*before, {**last, "content": marked}]
    *parts, part = last["content"]
    return [*before, {**last, "content": [*parts, {**part, "text": marked}]}]


def _up_to_mark(text: str, last: str) -> str:
    """Cut a conversation after the text of its last message, as ``transformers`` does.

    Raises:
        InvalidInput: the template changes the text, leaves it out, or writes it more than once.
    """
    mark = _MARK.rstrip()
    at = text.find(mark)
    if text.count(mark) != 1 or last.strip() not in text:
        fix = "this chat template does not write the last message as it was sent: leave it out"
        raise InvalidInput("continue_final_message", fix)
    return text[:at] if text.startswith(_MARK, at) else text[:at].rstrip()
