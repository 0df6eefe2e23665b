"""The promise of every actuator to the controller."""

from typing import Protocol

from moesaic.messages.scaling import FleetShape


class Actuator(Protocol):
    """Brings workers, and takes them away once they have finished their work.

    ``apply`` may be called as often as one likes, by one scheduler after another, with the same shape: it only
    begins what is not under way. Nothing that it takes away loses a request.
    """

    @property
    def name(self) -> str:
        """Its name in settings and logs."""
        ...

    async def most(self) -> FleetShape:
        """Return the largest shape that it can bring now.

        Raises:
            MoesaicError: what it works with cannot be reached.
        """
        ...

    async def intended(self) -> FleetShape:
        """Return the shape that it is set to, whether or not all of its workers are there.

        Raises:
            MoesaicError: what it works with cannot be reached.
        """
        ...

    async def apply(self, wanted: FleetShape) -> None:
        """Begin whatever leads to ``wanted``; returns before workers have come or gone.

        Raises:
            MoesaicError: what it works with cannot be reached, or refuses.
        """
        ...
