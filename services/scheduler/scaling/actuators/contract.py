"""The promise of every actuator to the controller."""

from typing import Protocol

from moesaic.messages.scaling import FleetShape


class Actuator(Protocol):
    """Brings workers, and takes them away once they have finished their work.

    ``apply`` may be repeated with the same shape, also by another scheduler: it only begins what is not in
    progress. Workers that it takes away lose no request.
    """

    @property
    def name(self) -> str:
        """Its name in settings and logs."""
        ...

    async def most(self) -> FleetShape:
        """Return the largest shape that it can bring now.

        Raises:
            MoesaicError: its backend cannot be reached.
        """
        ...

    async def intended(self) -> FleetShape:
        """Return the shape that it is set to, even if some of its workers are missing.

        Raises:
            MoesaicError: its backend cannot be reached.
        """
        ...

    async def apply(self, wanted: FleetShape) -> None:
        """Begin to reach ``wanted``; returns before workers have come or gone.

        Raises:
            MoesaicError: its backend cannot be reached, or refuses.
        """
        ...
