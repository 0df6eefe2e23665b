"""Chat templates: messages to the one text that the model was trained on. Needs no torch.

Neither the messages nor a template, which comes with the model, are trusted: rendering is sandboxed, and bounded in
time and size.
"""

import datetime
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from moesaic.errors import CheckpointError, InvalidInput
from moesaic.models.configuration.fields import read_json
from moesaic.models.text.call_messages import CALL_FORMS, CallMessages
from moesaic.models.text.sandbox import MAX_CHARACTERS, MAX_WIDTH, Sandbox
from moesaic.models.text.tokenizer import read_special_tokens

TEMPLATE_KWARGS = frozenset(
    {"enable_thinking", "thinking", "reasoning_effort", "tools", "documents"}
)
SLOW_S = 0.02
MAX_TOLD = 1000  # characters of what a template says
MAX_LOOPS = 100_000  # total length of all ranges in one rendering


class ChatTemplate:
    """The chat template of one model directory. Safe to use from several threads.

    Attributes:
        source: its text.
        variables: names that it asks for, such as ``tools``.
    """

    def __init__(self, sandbox: Sandbox, source: str, special: Mapping[str, str]) -> None:
        """Take the parts; ``load`` reads them. ``special`` has the texts of ``bos_token`` and the like."""
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(sandbox.parse(source)))
        self._sandbox, self._special = sandbox, dict(special)
        self._template = sandbox.from_string(source)
        self.is_slow = False  # it has taken longer than anything may take where others wait

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """Read ``chat_template.jinja``, or ``chat_template`` in ``tokenizer_config.json``.

        Raises:
            InvalidInput: the model has no chat template.
            CheckpointError: the template is not valid Jinja, or the file is invalid.
        """
        file, source = _read_source(directory)
        if source is None:
            raise InvalidInput("messages", "this model has no chat template; send a prompt instead")
        sandbox = _environment()
        try:
            return cls(sandbox, source, read_special_tokens(directory))
        except (jinja2.TemplateError, InvalidInput) as error:
            raise CheckpointError(file, f"the chat template is invalid: {error}") from error

    @functools.cached_property
    def call_form(self) -> CallMessages:
        """The form in which it takes messages with tool calls, found by trying."""
        return next((form for form in CALL_FORMS if form.fits(self.render)), CALL_FORMS[0])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Render a conversation to text.

        Args:
            messages: ``role`` and ``content`` of each turn, and other fields that the template knows.
            add_generation_prompt: end with the text that opens the model's answer.
            kwargs: of ``TEMPLATE_KWARGS``, for the template.

        Raises:
            InvalidInput: the template refuses the messages, an unknown keyword, or the text is too
                long.
        """
        for name in kwargs.keys() - TEMPLATE_KWARGS:
            allowed = ", ".join(sorted(TEMPLATE_KWARGS))
            raise InvalidInput(f"chat_template_kwargs.{name}", f"is not one of {allowed}")
        variables = {
            **self._special,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "range": _LoopBudget().range,
        }
        started = time.thread_time()
        try:
            with self._sandbox.budgeted():
                return _joined(self._template, variables)
        except InvalidInput:
            raise
        except (
            Exception
        ) as error:  # a template is a program, and what it trips over lies in the messages
            told = str(error)[:MAX_TOLD]
            raise InvalidInput("messages", f"the chat template refuses them: {told}") from error
        finally:
            self.is_slow |= time.thread_time() - started > SLOW_S


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change every text in a JSON value, the names of fields too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): with_texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    return value


class _LoopBudget:
    """Replace ``range`` in one rendering: nested loops share one bound."""

    def __init__(self) -> None:
        self._left = MAX_LOOPS

    def range(self, *bounds: int) -> range:
        loops = range(*bounds)
        self._left -= len(loops)
        if self._left < 0:
            raise jinja2.TemplateRuntimeError(f"its loops pass {MAX_LOOPS} rounds")
        return loops


def _environment() -> Sandbox:
    environment = Sandbox()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _read_source(directory: Path) -> tuple[str, str | None]:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.name, path.read_text(encoding="utf-8")
    path = directory / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several, by name
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, dict)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            path.name, f"chat_template: expected text, got {type(template).__name__}"
        )
    return path.name, template


def _joined(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces, size = [], 0
    for piece in template.generate(variables):
        size += len(piece)
        _check_size(size)
        pieces.append(piece)
    return "".join(pieces)


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise InvalidInput(
            "messages", f"their text passes {MAX_CHARACTERS} characters; send fewer or shorter ones"
        )


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False
) -> str:
    if indent is not None and indent > MAX_WIDTH:
        raise jinja2.TemplateRuntimeError("it indents too far")
    # Jinja's own filter would escape the text for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
