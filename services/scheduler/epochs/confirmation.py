"""Confirmation: workers are told which placement is committed until each of them has acknowledged it."""

import asyncio
from collections.abc import Iterable

from moesaic.cluster.registry import Fleet
from moesaic.errors import StaleEpoch
from moesaic.messages.placement import Incarnation, PlacedWorker, Placement
from moesaic.services.scheduler.epochs import workers


class Confirmation:
    """Puts the committed placement in force wherever that has not been acknowledged."""

    def __init__(self, fleet: Fleet, timeout_s: float) -> None:
        """``timeout_s``: for one worker that must load first."""
        self._fleet, self._timeout_s = fleet, timeout_s
        self._done: set[tuple[int, Incarnation]] = set()  # epochs in force on workers

    def forget(self) -> None:
        """Tell all workers again, which also frees placements that they prepared for nothing."""
        self._done.clear()

    def missing(self, current: Placement) -> list[PlacedWorker]:
        """List the live workers that have not acknowledged ``current``."""
        live = {record.incarnation for record in self._fleet.workers.values()}
        return [
            worker
            for worker in current.workers
            if (key := worker.incarnation) in live and (current.epoch, key) not in self._done
        ]

    async def confirm(self, current: Placement) -> bool:
        """Tell the live workers that have not acknowledged it.

        This ends early when the fleet changes: a decision about that is more urgent, and telling can be
        repeated.

        Returns:
            True if all have been told.

        Raises:
            StaleEpoch: a worker has seen a later epoch.
            MoesaicError: a worker could not be told; the others were.
        """
        self._done = {done for done in self._done if done[0] == current.epoch}
        seen = self._fleet.version
        telling = {
            worker.incarnation: asyncio.create_task(
                workers.confirm(worker, current, self._timeout_s)
            )
            for worker in self.missing(current)
        }
        if not telling:
            return True
        all_told = asyncio.create_task(_ended(telling.values()))
        news = asyncio.create_task(self._fleet.changed(seen))
        try:
            await asyncio.wait({all_told, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (all_told, news, *telling.values()):
                task.cancel()
            await asyncio.gather(all_told, news, *telling.values(), return_exceptions=True)
        errors = []
        for key, told in telling.items():
            if told.cancelled():
                continue
            if (error := told.exception()) is None:
                self._done.add((current.epoch, key))
            else:
                errors.append(error)
        errors.sort(key=lambda error: not isinstance(error, StaleEpoch))
        if errors:
            raise errors[0]
        return not any(told.cancelled() for told in telling.values())


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)
