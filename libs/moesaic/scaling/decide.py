"""Scaler: is another shape better than the one there is, and may it be brought now? Pure (paper, section 3.4).

===================  ===========================================================================================
Workers come         the shape is predicted to miss targets under the policy's headroom; or they are missed
Workers go           a cheaper shape is predicted to meet them under more than that, and all is calm
After an action      none for ``cool_down_s``, and none that takes it back for twice as long
But                  targets that are missed do not wait for the second; bounds wait for nothing
===================  ===========================================================================================
"""

from moesaic.messages.scaling import FleetShape, ScalingAction, ScalingPolicy
from moesaic.scaling.assessment import Assessment
from moesaic.scaling.contract import ScalingChoice, ScalingState, ServingLimits, StepTimes
from moesaic.scaling.proposals import ShapeProposal, fewer, into_bounds, more, one_more

DEFAULT_LIMITS = ServingLimits()


def grows(before: FleetShape, wanted: FleetShape) -> bool | None:
    """Tell the direction of an action, for ``ScalingAction.up``.

    Returns:
        True if either side gets workers, even if the other one loses some; ``None`` if nothing changes.
    """
    if before == wanted:
        return None
    return wanted.attention > before.attention or wanted.experts > before.experts


class Scaler:
    """Decides about numbers of workers. It has no state, so any scheduler can continue from the last action."""

    def __init__(self, times: StepTimes | None, limits: ServingLimits = DEFAULT_LIMITS) -> None:
        """Take what is known of the fleet.

        Args:
            times: times of steps; None: costs are unknown, and workers are only added, one by one.
            limits: limits of each attention worker.
        """
        self._times, self._limits = times, limits

    def decide(self, policy: ScalingPolicy, state: ScalingState) -> ScalingChoice | None:
        """Choose a better shape.

        Forecasts of the choice are made under the policy's headroom. In mode ``auto`` the last action counts as
        the shape there is, since it is being carried out.

        Returns:
            ``None`` if the shape is fine, or on its way to be.

        Raises:
            InvalidInput: a target is not positive, or the costs lack a part that some shape within bounds needs.
        """
        found = Assessment(policy, state, self._times, self._limits)
        proposal = into_bounds(found)
        if proposal is None and self._times is None:
            proposal = one_more(found)
        elif proposal is None:
            proposal = more(found) or fewer(found)
        if proposal is None:
            return None
        held = _held(found, proposal)
        adds = bool(grows(found.goal, proposal.wanted))
        is_predicted = self._times is not None
        return ScalingChoice(
            cause=proposal.cause,
            wanted=proposal.wanted,
            allowed=not held,
            reason=proposal.reason,
            held=held,
            bridged=adds and (found.is_missed or min(state.thresholds) < 1),
            forecast_before=found.forecast(state.shape, policy.headroom)
            if is_predicted and found.can_serve(state.shape)
            else None,
            forecast=found.forecast(proposal.wanted, policy.headroom)
            if is_predicted and found.can_serve(proposal.wanted)
            else None,
        )


def _held(found: Assessment, proposal: ShapeProposal) -> str:
    """Say what forbids to act now; empty if nothing does."""
    policy, action = found.policy, found.state.action
    if action is None or proposal.cause == "bounds":
        return ""
    # Clocks of two schedulers may differ.
    since_s = abs(found.state.now_s - action.at)
    if since_s < policy.cool_down_s:
        return f"the last action was {since_s:.0f} s ago, of {policy.cool_down_s:g} s to cool down"
    if since_s >= 2 * policy.cool_down_s or not _takes_back(found.goal, proposal.wanted, action):
        return ""
    if grows(found.goal, proposal.wanted) and found.is_missed:
        return ""
    return (
        f"it would take back the last action, {since_s:.0f} s ago, for which"
        f" {2 * policy.cool_down_s:g} s must pass"
    )


def _takes_back(before: FleetShape, wanted: FleetShape, action: ScalingAction) -> bool:
    """Tell if workers go that may have just come, or come after some have gone."""
    if action.up is None:
        return False
    removes = wanted.attention < before.attention or wanted.experts < before.experts
    return removes if action.up else bool(grows(before, wanted))
