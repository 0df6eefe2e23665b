"""Stop strings: found in the detokenised text, wherever tokens break it."""

from collections.abc import Sequence


class StopFinder:
    """Withholds text that may be the beginning of a stop string until it is known.

    The stop string whose occurrence ends first wins, the longest of several that end together. The text that is shown
    does not depend on the pieces that it came in.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Take more text, give the part to show; after a hit, ``hit`` names it and nothing more is shown."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop)) >= 0
        ]
        if found:
            end, _, self.hit = min(found)
            self._held = ""
            return text[: end if self._include else end - len(self.hit)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Give the withheld text: no more is coming."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Measure the longest ending of ``text`` that begins some stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(text), len(stop) - 1), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
