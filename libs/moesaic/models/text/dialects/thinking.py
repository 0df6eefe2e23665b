"""Reasoning before the answer, between tags: read, and let pass by grammars."""

from functools import partial
from typing import Literal, NamedTuple

from moesaic.models.text.dialects.reader import Reader, Reading
from moesaic.models.text.dialects.rules import Rules

Opened = Literal["open", "closed", "free"]
"""How the prompt leaves the reasoning: begun, over and done, or to the model."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning on or off."""


class ThinkingTags(NamedTuple):
    """Tags around reasoning."""

    name: str
    open: str
    close: str

    def left_by(self, prompt: str) -> Opened:
        """Tell how the end of a prompt leaves the reasoning."""
        end = prompt[-200:].rstrip()
        if end.endswith(self.open):
            return "open"
        return "closed" if end.endswith(self.close) else "free"

    def left_within(self, message: str) -> Opened:
        """Find out if reasoning is open at the end of a message's beginning."""
        return "open" if message.rfind(self.open) > message.rfind(self.close) else "closed"

    def closing(self, prompt: str) -> str | None:
        """Return the text that ends the open reasoning of a prompt; empty: it is closed; None: there is none."""
        left = self.left_by(prompt)
        if left != "open":
            return None if left == "free" else ""
        return f"\n{self.close}\n\n" if prompt.endswith("\n") else self.close

    def read(self, reader: Reader, opened: Opened, also_ends: tuple[str, ...]) -> Reading[str]:
        """Read the reasoning, if there is any; blanks at its ends and after it are left out.

        Returns:
            The marker among ``also_ends`` that ended it, if one did.
        """
        reader.reasoning = opened == "open"
        reader.hold()
        yield from reader.skip_blanks()
        if not (yield from reader.take(self.open)) and opened != "open":
            reader.restore()
            return ""
        reader.release()
        reader.reasoning = True
        yield from reader.skip_blanks()
        marker = yield from reader.passed(
            partial(reader.emit, "reasoning"), (self.close, *also_ends)
        )
        reader.reasoning = False
        if marker != self.close:
            return marker
        yield from reader.skip_blanks()
        return ""

    def rule(self, rules: Rules, opened: Opened) -> str:
        """Write the rule of what may come before the answer."""
        if opened == "closed":
            return ""
        blanks = rules.add(r"/[ \n]{0,3}/")
        rest = f"{rules.free_until(self.close)} {blanks}"
        return rest if opened == "open" else f"({blanks} {rules.text(self.open)} {rest})?"


THINK = ThinkingTags("think", "<think>", "</think>")
MISTRAL = ThinkingTags("mistral", "[THINK]", "[/THINK]")
