"""Chat templates: messages to the one text that the model was trained on. Needs no torch.

Neither the messages nor a template, which comes with the model, are trusted: a helper process renders
them, within limits of time and memory (``rendering``).
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from moesaic.errors import CheckpointError, InvalidInput
from moesaic.helper.helper import Helper
from moesaic.helper.limits import TooMuch
from moesaic.models.configuration.fields import read_json, read_text
from moesaic.models.configuration.tokenizer_files import read_special_tokens
from moesaic.models.text.call_messages import CALL_FORMS, CallMessages
from moesaic.models.text.rendering import LIMITS, MAX_HELD

TEMPLATE_KWARGS = frozenset(
    {"enable_thinking", "thinking", "reasoning_effort", "tools", "documents"}
)
MAX_PROCESSES = 5  # that render at a time

_RENDERING = "moesaic.models.text.rendering"
# All templates of a process share the helper, which ends with the last of them.
_helpers: WeakValueDictionary[str, Helper] = WeakValueDictionary()


class ChatTemplate:
    """The chat template of one model directory. Safe to use from several threads.

    Attributes:
        source: its text.
        variables: names that it asks for, such as ``tools``.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Take the parts; ``load`` reads them.

        Args:
            source: its text.
            special: the texts of ``bos_token`` and the like.

        Raises:
            ValueError: it is no template.
            NotReady: the helper process was ended or stopped from outside.
        """
        self._helper = _helpers.get(_RENDERING) or Helper(
            _RENDERING, [], LIMITS, most=MAX_PROCESSES
        )
        _helpers[_RENDERING] = self._helper
        self.source, self._special = source, dict(special)
        self.variables = frozenset(self._asked(None)["asks_for"])

    @classmethod
    def load(cls, directory: Path) -> "ChatTemplate":
        """Read ``chat_template.jinja``, or ``chat_template`` in ``tokenizer_config.json``.

        Raises:
            InvalidInput: the model has no chat template.
            CheckpointError: the template is not valid Jinja, or the file is invalid.
            NotReady: the helper process was ended or stopped from outside.
        """
        file, source = _read_source(directory)
        if source is None:
            raise InvalidInput("messages", "this model has no chat template; send a prompt instead")
        special = read_special_tokens(directory)
        try:
            return cls(source, special)
        except ValueError as error:
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
        """Render a conversation to text. This waits for another process.

        Args:
            messages: ``role`` and ``content`` of each turn, and other fields that the template knows;
                values are those that JSON can hold.
            add_generation_prompt: end with the text that opens the model's answer.
            kwargs: of ``TEMPLATE_KWARGS``, for the template.

        Raises:
            InvalidInput: the template refuses the messages, an unknown keyword, or the text is too
                long, or rendering it takes too much.
            NotReady: the helper process was ended or stopped from outside.
        """
        for name in kwargs.keys() - TEMPLATE_KWARGS:
            allowed = ", ".join(sorted(TEMPLATE_KWARGS))
            raise InvalidInput(f"chat_template_kwargs.{name}", f"is not one of {allowed}")
        variables = {
            **self._special,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text: str = self._asked(variables)["text"]
        except ValueError as error:
            refusal = f"the chat template refuses them: {error}"
            raise InvalidInput("messages", refusal) from error
        return text

    def _asked(self, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """Have the template rendered; without variables, described.

        Raises:
            ValueError: saying why it cannot be.
        """
        question = {"source": self.source, "variables": variables}
        try:
            told: dict[str, Any] = self._helper.ask(question)
        except TooMuch as verdict:
            takes = f"it takes more than {LIMITS.cpu_s:g} s of CPU"
            if verdict.limit != "time":
                takes = f"it makes texts of more than {MAX_HELD} characters"
            raise ValueError(takes) from verdict
        except RecursionError as error:
            raise ValueError("they are nested too deeply") from error
        if (refused := told.get("refused")) is not None:
            raise ValueError(refused)
        return told


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change every text in a JSON value, the names of fields too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): with_texts(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [with_texts(item, change) for item in value]
    return value


def _read_source(directory: Path) -> tuple[str, str | None]:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.name, read_text(path)
    path = directory / "tokenizer_config.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(template, list):  # several, by name
        named = {
            entry["name"]: entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            path.name, f"chat_template: expected text, got {type(template).__name__}"
        )
    return path.name, template
