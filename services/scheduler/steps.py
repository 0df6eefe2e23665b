"""Steps of the loop that decides about the placement: the next action, from the present facts.

Nothing here waits or changes anything. Each step looks at the situation and names its work, or None.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from moesaic.messages.decisions import Pin
from moesaic.messages.placement import Placement
from moesaic.messages.registry import WorkerRecord
from moesaic.messages.substitution import Substitution
from moesaic.placement.decide.fitting import fitting
from moesaic.placement.decide.pins import with_pins
from moesaic.placement.decide.proposal import Proposal
from moesaic.placement.decide.stand_ins import own_part, with_substitution
from moesaic.services.scheduler import causes


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Facts that a leader decides by.

    Attributes:
        current: the committed placement.
        proposal: proposal for the present workers.
        workers: all workers, by id.
        pins: pins of operators.
        pins_tried: the pins were tried since the epoch, the pins or the plan last changed.
        substitution: the way to degrade that operators want and workers can have.
        may_change: a placement that can wait has waited long enough.
        unconfirmed: a worker has not acknowledged ``current``.
        went_back: Redis went back to an earlier state: a worker has seen a later epoch, or another
            placement of this one.
        plan_due: it is time to plan by the traffic.
    """

    current: Placement | None
    proposal: Proposal
    workers: Mapping[str, WorkerRecord]
    pins: list[Pin]
    pins_tried: bool
    substitution: Substitution
    may_change: bool
    unconfirmed: bool
    went_back: bool
    plan_due: bool

    @property
    def settled(self) -> Placement | None:
        """The committed placement, if all workers have it and call for no other one."""
        is_wanted = self.proposal.placement is None
        return self.current if is_wanted and not (self.unconfirmed or self.went_back) else None

    @property
    def changeable(self) -> Placement | None:
        """The model's own part of ``settled``, if it degrades as wanted and may change."""
        settled = self.settled
        if settled is None or settled.substitution != self.substitution or not self.may_change:
            return None
        return own_part(settled)


@dataclass(frozen=True)
class PlaceStep:
    """Make ``wanted`` the placement.

    Attributes:
        wanted: placement of any epoch.
        cause: fields of its ``PlacementDecision``.
        urgent: see ``Placer.place``.
    """

    wanted: Placement
    cause: dict[str, Any]
    urgent: bool = False


@dataclass(frozen=True)
class ConfirmStep:
    """Tell workers which placement is committed."""


@dataclass(frozen=True)
class PlanStep:
    """Plan by the traffic, for the model's own part of the committed placement."""

    current: Placement


Step = PlaceStep | ConfirmStep | PlanStep


def next_step(now: Situation) -> Step | None:
    """Choose the first step that is due; None: wait."""
    return (
        settle_workers(now)
        or go_ahead_of_workers(now)
        or confirm(now)
        or change_substitution(now)
        or place_pins(now)
        or rebalance(now)
    )


def settle_workers(now: Situation) -> PlaceStep | None:
    """Place what the coming and going of workers calls for, at once if it is urgent."""
    proposed = now.proposal.placement
    if proposed is None or not (now.proposal.urgent or now.may_change):
        return None
    current = own_part(now.current) if now.current else None
    wanted = with_pins(proposed, now.pins)
    # A pin must not stop what workers need.
    if wanted.slots != proposed.slots:
        wanted = fitting(proposed, wanted, list(now.workers.values()), current)
    cause = causes.by_workers(current, wanted, now.workers)
    return PlaceStep(wanted, cause, urgent=now.proposal.urgent)


def go_ahead_of_workers(now: Situation) -> PlaceStep | None:
    """Place the same under a new epoch, if a worker has seen a later one than that of ``current``."""
    if now.current is None or not now.went_back:
        return None
    cause = causes.by_workers(now.current, now.current, now.workers)
    return PlaceStep(replace(now.current, epoch=0), cause, urgent=True)


def confirm(now: Situation) -> ConfirmStep | None:
    """Tell workers which placement is committed, until all have acknowledged it."""
    return ConfirmStep() if now.current is not None and now.unconfirmed else None


def change_substitution(now: Situation) -> PlaceStep | None:
    """Change the way in which choices are degraded; experts stay where they are."""
    settled = now.settled
    if settled is None or settled.substitution == now.substitution:
        return None
    wanted = with_substitution(settled, now.substitution)
    return PlaceStep(wanted, causes.by_substitution(settled, wanted, now.workers))


def place_pins(now: Situation) -> PlaceStep | None:
    """Place as many of the pins as possible."""
    current = now.changeable
    if current is None or now.pins_tried:
        return None
    wanted = with_pins(current, now.pins)
    possible = fitting(current, wanted, list(now.workers.values()), current)
    if possible.slots == current.slots:
        return None
    return PlaceStep(possible, causes.by_operator(current, possible, now.workers))


def rebalance(now: Situation) -> PlanStep | None:
    """Plan by the traffic when it is time."""
    current = now.changeable
    return PlanStep(current) if current is not None and now.plan_due else None
