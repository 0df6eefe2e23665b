"""Reading an answer as it grows: each form is a generator, and this has the steps that all of them take.

A step decides by the text alone, never by the pieces that it came in: it waits for more where more could change it.
So the parts of an answer, joined, are the same however its text was cut.
"""

import functools
import re
from collections.abc import Callable, Generator
from typing import Literal, NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # it yields where it needs more text
Put = Callable[[str], None]
Kind = Literal["content", "reasoning", "call", "arguments"]

BLANKS = " \t\r\n"
MOST_BLANKS = 256  # that are held back before what may be a marker
MOST_HEAD = 512  # characters of what precedes the arguments of a call
_PLAIN = re.compile(r"[\s\w.,:+-]+")
_SCALAR = re.compile(r"[\w.+-]+")
_IN_STRING = re.compile(r'(?:[^"\\]|\\.)+', re.DOTALL)
_PAIRS = {"}": "{", "]": "["}


class Part(NamedTuple):
    """A piece of an answer: text of one kind; of a call its name, which the arguments follow."""

    kind: Kind
    text: str
    call_id: str = ""  # as the model wrote it, if it did


class Reader:
    """Takes an answer's text piece by piece and gives its parts.

    Attributes:
        reasoning: the text that follows is reasoning.
        done: nothing that follows counts.
        one_call: the first call ends the answer.
    """

    def __init__(self, read: Callable[["Reader"], Reading[None]], *, one_call: bool) -> None:
        self.reasoning = self.done = False
        self.one_call = one_call
        self.blanks_before = ""  # those left out before the marker that ``passed`` gave last
        self._text, self._at, self._ended = "", 0, False
        self._mark: int | None = None
        self._parts: list[Part] = []
        self._reading = read(self)
        next(self._reading, None)

    def feed(self, text: str) -> list[Part]:
        """Take more text; give the parts that are certain now."""
        if not text or self.done:
            return []
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        if self._mark is not None:
            self._mark = 0
        return self._go_on()

    def finish(self) -> list[Part]:
        """Give what is left: no more is coming."""
        self._ended = True
        return [] if self.done else self._go_on()

    def _go_on(self) -> list[Part]:
        try:
            next(self._reading)
        except StopIteration:
            self.done = True
        parts, self._parts = self._parts, []
        return parts

    def emit(self, kind: Kind, text: str) -> None:
        """Give text out."""
        if not text:
            return
        if self._parts and self._parts[-1].kind == kind:
            text = self._parts.pop().text + text
        self._parts.append(Part(kind, text))

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a call: from here on it stays one, with any text that follows."""
        self.release()
        self._parts.append(Part("call", name, call_id))

    def put_arguments(self, text: str) -> None:
        """Give out arguments of the call that was begun last."""
        self.emit("arguments", text)

    def hold(self) -> None:
        """Keep the text from here on, for ``restore``."""
        self._mark = self._at

    def restore(self) -> None:
        """Go back to where ``hold`` was."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def release(self) -> None:
        """Forget ``hold``."""
        self._mark = None

    def step_back(self, length: int) -> None:
        """Read the last ``length`` characters once more."""
        self._at -= length

    def _more(self) -> Reading[bool]:
        if self._ended:
            return False
        yield
        return True

    def next_char(self) -> Reading[str]:
        """Look at the next character, empty at the end."""
        while self._at >= len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def skip_blanks(self) -> Reading[None]:
        """Pass over blanks and line breaks."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in BLANKS:
                self._at += 1
            if self._at < len(self._text) or not (yield from self._more()):
                return

    def take(self, *literals: str) -> Reading[str]:
        """Take the one of some texts that comes next; empty if none does. None begins another."""
        while True:
            for literal in literals:
                if self._text.startswith(literal, self._at):
                    self._at += len(literal)
                    return literal
            rest = self._text[self._at :]
            undecided = any(literal.startswith(rest) for literal in literals)
            if not undecided or not (yield from self._more()):
                return ""

    def collect(
        self, ends: tuple[str, ...], most: int | None = MOST_HEAD
    ) -> Reading[tuple[str, str]]:
        """Take text up to the first of some ends.

        Returns:
            The text, and the end; without an end within ``most`` characters the end is empty, and nothing is taken.
        """
        pattern = _pattern(ends)
        # Characters in which no end begins.
        searched = 0
        longest = max(map(len, ends))
        while True:
            start = self._at
            found = pattern.search(self._text, start + searched)
            if found and (most is None or found.start() - start <= most):
                self._at = found.end()
                return self._text[start : found.start()], found.group()
            length = len(self._text) - start
            searched = max(searched, length - longest + 1)
            too_long = most is not None and length > most + longest
            if found or too_long or not (yield from self._more()):
                return "", ""

    def passed(self, put: Put, markers: tuple[str, ...], held: str = BLANKS) -> Reading[str]:
        """Give text out, up to the first of some markers or the end.

        Args:
            put: takes the text.
            markers: none of them begins another.
            held: characters that are left out right before a marker, ``MOST_BLANKS`` of them.

        Returns:
            The marker; empty at the end.
        """
        pattern, firsts = _pattern(markers), _firsts(markers)
        while True:
            start, length = self._at, len(self._text)
            found, end = None, length
            if any(first in self._text for first in firsts):
                found = pattern.search(self._text, start)
                end = found.start() if found else length - self._undecided(markers)
            shown = self._text[start:end]
            kept = min(len(shown) - len(shown.rstrip(held)), MOST_BLANKS) if markers and held else 0
            if found:
                put(shown[: len(shown) - kept])
                self.blanks_before = shown[len(shown) - kept :]
                self._at = found.end()
                return found.group()
            put(shown[: len(shown) - kept])
            self._at = end - kept
            if not (yield from self._more()):
                put(self._text[self._at :])
                self._at = length
                return ""

    def _undecided(self, markers: tuple[str, ...]) -> int:
        """Measure the longest ending of the text that begins some marker."""
        text, length, longest = self._text, len(self._text), 0
        for marker in markers:
            at = text.find(marker[0], max(self._at, length - len(marker) + 1))
            while at >= 0:
                if marker.startswith(text[at:]):
                    longest = max(longest, length - at)
                    break
                at = text.find(marker[0], at + 1)
        return longest

    def json_value(self, put: Put) -> Reading[bool]:
        """Give out a value of JSON as it is written; true if it ends as one. Other text is left alone."""
        nested: list[str] = []
        in_string = scalar = False
        while True:
            start, at, length = self._at, self._at, len(self._text)
            result: bool | None = None
            while at < length and result is None:
                char = self._text[at]
                if in_string:
                    if found := _IN_STRING.match(self._text, at):
                        at = found.end()
                    elif char == '"':
                        at, in_string = at + 1, False
                        result = None if nested else True
                    else:
                        # A backslash before what is to come.
                        break
                elif found := (_PLAIN if nested else _SCALAR).match(self._text, at):
                    at, scalar = found.end(), not nested
                elif scalar:
                    result = True
                elif char == '"':
                    at, in_string = at + 1, True
                elif char in "{[":
                    at += 1
                    nested.append(char)
                elif char in "}]" and nested and nested[-1] == _PAIRS[char]:
                    at += 1
                    nested.pop()
                    result = None if nested else True
                else:
                    result = False
            put(self._text[start:at])
            self._at = at
            if result is not None:
                return result
            if not (yield from self._more()):
                put(self._text[self._at :])
                self._at = length
                return scalar


@functools.lru_cache(256)
def _firsts(markers: tuple[str, ...]) -> str:
    return "".join({marker[0] for marker in markers})


@functools.lru_cache(256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))
