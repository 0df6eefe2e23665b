"""Chat templates, which turn messages into the text form that the model was trained on. Needs no torch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.errors import CheckpointError, InvalidInput
from moesaic.models.configuration.tokenizer_files import read_special_tokens
from moesaic.models.text.message_forms import REASONING_FIELDS, MessageForms, whole_tools
from moesaic.models.text.program import Program, TemplateRefusal
from moesaic.models.text.template_files import DEFAULT, TOOL_USE, read_templates

Messages = Sequence[Mapping[str, Any]]
_ALWAYS: dict[str, Any] = {"tools": None, "documents": None}
# A private character that no text has. A template that strips blanks removes only the blank after it.
_MARK = "\U0010fff0 "


class ChatTemplate:
    """The chat template of one model directory. Safe to use from several threads.

    Some models have a second one, for conversations with tools.

    Attributes:
        source: the text of the templates.
        special: the texts of ``bos_token`` and the like, which they know as variables.
        variables: names of variables that they read, such as ``tools``.
        words: fields and strings that they name, such as ``content``.
    """

    def __init__(
        self, source: str | None, special: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """Take the parts; ``load`` reads them.

        Args:
            source: text of the template for conversations without tools, if there is one.
            special: the texts of ``bos_token`` and the like.
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
            kwargs: for the template, such as ``tools``; it does not get variables that it does not read.

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
            messages: as ``render`` takes them; each call in them has its arguments as a text.
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
