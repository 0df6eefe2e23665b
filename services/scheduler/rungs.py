"""The way to degrade: the operators' order, as far as workers can carry it out."""

from collections.abc import Callable, Sequence

import structlog

from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.rung import Rung

log = structlog.get_logger()

WITHOUT_UNITED = Rung(instead="fewer")


class Rungs:
    """Remembers which rungs were refused since operators changed their order."""

    def __init__(self, asked_for: Callable[[], Rung]) -> None:
        """``asked_for`` gives the rung that operators want."""
        self._asked_for_now, self._asked_for = asked_for, Rung()
        self._refused: set[Rung] = set()
        self._told_differing = ""

    @property
    def asked_for(self) -> Rung:
        """The rung that operators want."""
        return self._asked_for_now()

    def possible(self, current: Placement | None, experts: Sequence[WorkerRecord]) -> Rung:
        """Return the rung that operators want; without united experts if there can be none.

        Args:
            current: the committed placement.
            experts: the workers that hold experts.
        """
        if self.asked_for != self._asked_for:
            self._asked_for = self.asked_for
            self._refused.clear()
        if self._can_be(self._asked_for, current, experts):
            return self._asked_for
        if (
            current is not None
            and current.num_united
            and self._can_be(current.rung, current, experts)
        ):
            return current.rung
        return WITHOUT_UNITED

    def refuse(self, rung: Rung, cause: str) -> None:
        """Do without a rung that workers cannot load, until operators want another one."""
        self._refused.add(rung)
        log.error("rung.refused", way=rung.way, cause=cause)

    def _can_be(
        self, rung: Rung, current: Placement | None, experts: Sequence[WorkerRecord]
    ) -> bool:
        """False if a rung was refused, or workers have other united experts for it than others."""
        if rung in self._refused:
            return False
        if rung.instead != "united":
            return True
        found = {
            record.worker_id: record.united.get(rung.way, "")
            for record in experts
            if current is None or record.model_digest == current.model_digest
        }
        differing = ", ".join(sorted(found)) if len(set(found.values())) > 1 else ""
        if differing and differing != self._told_differing:
            log.error("rung.refused", way=rung.way, cause=f"united experts differ: {differing}")
        self._told_differing = differing
        return not differing
