"""Choice of the way of each round: the fastest one by link costs. Pure, but for the log."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import structlog

from moesaic.dispatch.two_phase.choice.costs import LinkCosts, RoundShape, Way, predict

log = structlog.get_logger()

Mode = Literal["auto", "direct", "reduce", "relay"]

_MOST_KINDS = 1024  # of rounds, that the log tells apart


@dataclass(frozen=True)
class RoundChoice:
    """A way, why it is gone, and the seconds that each should take.

    Nothing is predicted while link costs are not known. ``forced`` are rows that go directly because
    neighbours are elsewhere, or something failed.
    """

    way: Way
    why: Literal["faster", "told", "forced"]
    predicted_s: Mapping[Way, float] = field(default_factory=dict)


class RoundChooser:
    """Chooses ways."""

    def __init__(self, mode: Mode) -> None:
        """Choose ``mode``; if that is ``auto``, the way that should be the fastest."""
        self.mode = mode
        self.senders = 1  # attention nodes that use the same expert nodes
        self.costs: LinkCosts | None = None  # before they are measured
        self._reported: dict[Hashable, Way] = {}  # by kind of round

    @property
    def is_ready(self) -> bool:
        """True once a choice can be made."""
        return self.mode != "auto" or self.costs is not None

    def choose(self, shape: RoundShape) -> RoundChoice:
        """Choose the way of a round.

        Without link costs ``relay``, which moves the fewest bytes between nodes: then these are rows
        of a neighbour that knows more.
        """
        predicted_s = self._predict(shape)
        if self.mode != "auto":
            return RoundChoice(self.mode, "told", predicted_s)
        if not predicted_s:
            return RoundChoice("relay", "faster")
        choice = RoundChoice(min(predicted_s, key=predicted_s.__getitem__), "faster", predicted_s)
        self._report(choice, shape)
        return choice

    def directly(self, shape: RoundShape) -> RoundChoice:
        """Describe rows that go directly, for whatever reason."""
        predicted_s = self._predict(shape)
        fastest = not predicted_s or predicted_s["direct"] == min(predicted_s.values())
        chosen = self.mode == "auto" and fastest
        return RoundChoice("direct", "faster" if chosen else "forced", predicted_s)

    def _predict(self, shape: RoundShape) -> dict[Way, float]:
        if self.costs is None:
            return {}
        return predict(replace(shape, senders=self.senders), self.costs)

    def _report(self, choice: RoundChoice, shape: RoundShape) -> None:
        """Log the choice for rounds of equally many workers and, in powers of two, bytes."""
        size = shape.request_bytes.bit_length()
        kind = shape.members, shape.instances, shape.own_instances, size
        if self._reported.get(kind) == choice.way:
            return
        if len(self._reported) >= _MOST_KINDS:
            self._reported = {}  # of batches and workers that come no more
        self._reported[kind] = choice.way
        log.info(
            "exchange.chosen",
            way=choice.way,
            kbytes=shape.request_bytes / 1e3,
            members=shape.members,
            predicted_ms={way: round(1e3 * s, 3) for way, s in choice.predicted_s.items()},
        )
