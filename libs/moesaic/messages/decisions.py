"""Decisions of the scheduler about the placement, with their outcomes; and settings of operators."""

from typing import Annotated, Literal

import msgspec

from moesaic.messages.bounds import Count, Name, Number, SmallCount
from moesaic.messages.order import Order

EVERY_LAYER = -1


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """An order of an operator: this worker holds this expert under every placement."""

    layer: Annotated[
        int, msgspec.Meta(ge=EVERY_LAYER, le=(1 << 31) - 1)
    ]  # a decoder layer, or ``EVERY_LAYER``
    expert: SmallCount
    worker_id: Name


class PlacementPolicy(Order, frozen=True, kw_only=True, tag="placement-policy.v1"):
    """Settings of operators; they outlive every scheduler.

    Attributes:
        policy: name of the policy.
        pins: pins that hold under every policy.
    """

    policy: Name
    pins: list[Pin] = msgspec.field(default_factory=list)


class PlacementDecision(msgspec.Struct, frozen=True, kw_only=True, tag="placement-decision.v1"):
    """One decision with its cause, and its predicted gain."""

    decision_id: Name
    at: Number  # seconds since 1970 by the scheduler's clock, for people
    cause: Literal["workers", "traffic", "operator"]
    adopted: bool
    reason: str
    policy: str = ""
    epoch_before: Count = 0
    moves: SmallCount = 0  # experts that workers must load
    moved_bytes: Count = 0
    batches: float = 0.0  # dispatch batches seen lately, older ones counting less
    sampled_batches: SmallCount = 0  # of them replayed for the prediction
    predicted_before: float | None = None  # most activated experts on one worker, mean of batches
    predicted_after: float | None = None
    predicted_s: float | None = None  # from preparing to committing
    local_share_before: float | None = None  # edge agents: of choices, those at their own site
    local_share_after: float | None = None
    row_s_before: float | None = None  # edge agents: mean wait of a choice for experts elsewhere
    row_s_after: float | None = None


class DecisionOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="decision-outcome.v1"):
    """The outcome of an adopted decision."""

    decision_id: Name
    tried: Count = 0  # the epoch that is or was prepared; 0: none was
    epoch: Count = 0  # that was committed; 0: none was
    seconds: float | None = None  # from preparing to committing
    failure: str = ""
    measured_after: float | None = None  # as ``predicted_after``, of batches that were served
    measured_batches: SmallCount = 0
    measured_local_share: float | None = None  # as ``local_share_after``, of choices since then
    measured_row_s: float | None = None
    measured_choices: Count = 0
