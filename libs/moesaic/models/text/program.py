"""Templates as programs for a helper process. Neither templates nor messages are trusted.

The helper renders within limits of time and memory (``rendering``).
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from moesaic.errors import InvalidInput
from moesaic.helper.helper import Helper
from moesaic.helper.limits import TooMuch
from moesaic.models.text.rendering import LIMITS, MAX_HELD

MAX_PROCESSES = 5  # that render at a time

_RENDERING = "moesaic.models.text.rendering"
# All templates of a process share the helper, which ends with the last of them.
_helpers: WeakValueDictionary[str, Helper] = WeakValueDictionary()


class TemplateRefusal(InvalidInput):
    """A template refuses a conversation, without reaching a limit."""


class _Refused(ValueError):
    """The reason that a template gives."""


class Program:
    """One template. Safe to use from several threads.

    Attributes:
        source: text of the program.
        variables: names of variables that it reads, such as ``tools``.
        words: fields and strings that it names, such as ``content``.
    """

    def __init__(self, source: str) -> None:
        """Compile it in the helper process.

        Raises:
            ValueError: it is not a valid template.
            NotReady: the helper process was ended or stopped from outside.
        """
        self._helper = _helpers.get(_RENDERING) or Helper(
            _RENDERING, [], LIMITS, most=MAX_PROCESSES
        )
        _helpers[_RENDERING] = self._helper
        self.source = source
        told = self._asked(None)
        self.variables, self.words = frozenset(told["asks_for"]), frozenset(told["words"])

    def render(self, variables: Mapping[str, Any]) -> str:
        """Render it. This waits for another process.

        Raises:
            TemplateRefusal: it raises an error.
            InvalidInput: the text is too long, or rendering it takes too much.
            NotReady: the helper process was ended or stopped from outside.
        """
        try:
            text: str = self._asked(variables)["text"]
        except ValueError as error:
            kind = TemplateRefusal if isinstance(error, _Refused) else InvalidInput
            raise kind("messages", f"the chat template refuses them: {error}") from error
        return text

    def _asked(self, variables: Mapping[str, Any] | None) -> dict[str, Any]:
        """Render it in the helper process; without variables, describe it.

        Raises:
            ValueError: the template failed; the text is its reason.
        """
        try:
            told: dict[str, Any] = self._helper.ask({"source": self.source, "variables": variables})
        except TooMuch as verdict:
            takes = f"it takes more than {LIMITS.cpu_s:g} s of CPU"
            if verdict.limit != "time":
                takes = f"it makes texts of more than {MAX_HELD} characters"
            raise ValueError(takes) from verdict
        except RecursionError as error:
            raise ValueError("they are nested too deeply") from error
        if (refused := told.get("refused")) is not None:
            raise _Refused(refused)
        return told
