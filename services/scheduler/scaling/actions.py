"""The last scaling action, which outlives every scheduler."""

import time
from collections.abc import Callable

from msgspec.structs import replace

from moesaic.cluster.leadership import Leadership
from moesaic.cluster.redis.bus import Bus
from moesaic.errors import NotReady
from moesaic.messages.scaling import FleetShape, ScalingAction
from moesaic.services.scheduler.epochs.store import EpochStore
from moesaic.services.scheduler.versioned import VersionedStore

ACTION = "scaling:action"
OVERTAKEN = "another shape was wanted before it was there"

_NONE = ScalingAction(number=0, shape=FleetShape(0, 0))


class ActionStore(VersionedStore[ScalingAction]):
    """The action, as every order is kept."""

    def __init__(
        self,
        bus: Bus,
        epochs: EpochStore,
        leadership: Leadership,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(bus, epochs, leadership, ACTION, _NONE, wall_clock=wall_clock)

    @property
    def action(self) -> ScalingAction | None:
        """The last action, if there was one."""
        return self.current if self.current.number else None

    async def want(
        self, shape: FleetShape, before: FleetShape, decision_id: str
    ) -> ScalingAction | None:
        """Make ``shape`` the action in force, one number after the last.

        Args:
            shape: the wanted shape.
            before: the present shape.
            decision_id: id of the decision behind it.

        Returns:
            The action that it supersedes, if there was one that had not ended.

        Raises:
            NotReady: another scheduler leads now, or wrote at the same time; nothing has changed.
            PeerLost: Redis did not answer, and the outcome is unknown.
        """
        last = _NONE

        def wanted(known: ScalingAction) -> ScalingAction:
            nonlocal last
            last = known
            return ScalingAction(
                number=known.number + 1,
                shape=shape,
                decision_id=decision_id,
                at=self._wall_clock(),
                up=_direction(before, shape),
            )

        await self.change(wanted)
        return last if last.number and not last.ended else None

    async def end(self, seconds: float | None = None, failure: str = "") -> ScalingAction:
        """Record the end of the action in force, once.

        Args:
            seconds: time until its shape was reached.
            failure: reason why it was given up.

        Returns:
            The action with its end.

        Raises:
            NotReady: another scheduler leads now, or there is another action.
            PeerLost: Redis did not answer, and the outcome is unknown.
        """
        action = self.action

        def ended(known: ScalingAction) -> ScalingAction:
            if known != action:
                raise NotReady("another shape is wanted now")
            return replace(known, seconds=seconds, failure=failure)

        return await self.change(ended)


def _direction(before: FleetShape, after: FleetShape) -> bool | None:
    """True if workers are added, False if some are only taken away, None for neither."""
    if after.attention > before.attention or after.experts > before.experts:
        return True
    return None if after == before else False
