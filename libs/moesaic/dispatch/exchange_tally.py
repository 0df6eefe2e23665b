"""ExchangeTally: what the steps of one dispatcher wait for because experts are in other processes."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


class Exchanged(NamedTuple):
    """Sums over exchanges.

    Attributes:
        num: exchanges, one a layer and part of a step.
        seconds: of the engine's thread, from sending rows to the sum of all replies.
        beyond_s: of it, without what the slowest expert worker computed; 0 where workers do not tell.
        messages: there and back.
        nbytes: there and back.
        is_inter: some went to another node.
    """

    num: int = 0
    seconds: float = 0.0
    beyond_s: float = 0.0
    messages: int = 0
    nbytes: int = 0
    is_inter: bool = False

    def and_also(self, more: "Exchanged") -> "Exchanged":
        """Add up two sums."""
        return Exchanged(
            self.num + more.num,
            self.seconds + more.seconds,
            self.beyond_s + more.beyond_s,
            self.messages + more.messages,
            self.nbytes + more.nbytes,
            self.is_inter or more.is_inter,
        )


NOTHING = Exchanged()


@dataclass
class ExchangeTally:
    """Adds up exchanges until they are taken; for one thread."""

    _sum: Exchanged = NOTHING

    def add(self, exchanged: Exchanged) -> None:
        """Count some more."""
        self._sum = self._sum.and_also(exchanged)

    def take(self) -> Exchanged:
        """Take the sums since the last call."""
        taken, self._sum = self._sum, NOTHING
        return taken


@runtime_checkable
class Exchanging(Protocol):
    """A dispatcher whose experts are in other processes."""

    @property
    def exchanges(self) -> ExchangeTally:
        """Exchanges of its steps."""
        ...
