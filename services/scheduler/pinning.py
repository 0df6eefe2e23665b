"""Pins: tried once for each epoch and set of pins, and again after every plan."""

from collections.abc import Iterable

from moesaic.messages.decisions import Pin
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.placement.decide.fitting import fitting
from moesaic.placement.decide.pins import with_pins


class Pinning:
    """Proposes a placement with the pins that can be had.

    A pin that cannot be had, or whose expert could not be loaded, waits until the epoch or the pins
    have changed, or until ``forget``.
    """

    def __init__(self) -> None:
        self._tried: tuple[int, list[Pin]] = (0, [])  # and the epoch that they were tried for

    def propose(
        self, current: Placement, pins: list[Pin], records: Iterable[WorkerRecord]
    ) -> Placement:
        """The placement in force with as many pins as possible; ``current`` if none can be added."""
        if self._tried == (current.epoch, pins):
            return current
        possible = fitting(current, with_pins(current, pins), list(records), current)
        if possible.slots == current.slots:
            self._tried = current.epoch, pins
        return possible

    def note_tried(self, current: Placement, pins: list[Pin]) -> None:
        """Remember that the pins are being placed under this epoch."""
        self._tried = current.epoch, pins

    def forget(self) -> None:
        """Try all pins again."""
        self._tried = 0, []
