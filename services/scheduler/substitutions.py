"""The substitution: the operators' order, as far as workers can carry it out."""

from collections.abc import Callable, Sequence

import structlog

from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.substitution import Substitution

log = structlog.get_logger()

WITHOUT_UNITED = Substitution(instead="fewer")


class Substitutions:
    """Remembers which substitutions were refused since operators changed their order."""

    def __init__(self, asked_for: Callable[[], Substitution]) -> None:
        """``asked_for`` gives the substitution that operators want."""
        self._asked_for_now, self._asked_for = asked_for, Substitution()
        self._refused: set[Substitution] = set()
        self._told_differing = ""

    @property
    def asked_for(self) -> Substitution:
        """The substitution that operators want."""
        return self._asked_for_now()

    def possible(self, current: Placement | None, experts: Sequence[WorkerRecord]) -> Substitution:
        """Return the substitution that operators want; without united experts if there can be none.

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
            and self._can_be(current.substitution, current, experts)
        ):
            return current.substitution
        return WITHOUT_UNITED

    def refuse(self, substitution: Substitution, cause: str) -> None:
        """Do without a substitution that workers cannot load, until operators want another one."""
        self._refused.add(substitution)
        log.error("substitution.refused", way=substitution.way, cause=cause)

    def _can_be(
        self, substitution: Substitution, current: Placement | None, experts: Sequence[WorkerRecord]
    ) -> bool:
        """False if a substitution was refused, or workers have other united experts for it than others."""
        if substitution in self._refused:
            return False
        if substitution.instead != "united":
            return True
        found = {
            record.worker_id: record.united.get(substitution.way, "")
            for record in experts
            if current is None or record.model_digest == current.model_digest
        }
        differing = ", ".join(sorted(found)) if len(set(found.values())) > 1 else ""
        if differing and differing != self._told_differing:
            log.error(
                "substitution.refused",
                way=substitution.way,
                cause=f"united experts differ: {differing}",
            )
        self._told_differing = differing
        return not differing
