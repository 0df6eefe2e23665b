"""The decisions that are worth telling: few, with their results. Pure."""

from msgspec.structs import replace

from moesaic.brownout.control.contract import EXACT, PHASES
from moesaic.brownout.control.ladder import Ladder, LadderState
from moesaic.messages.brownout import BrownoutDecision, BrownoutMode

WORTH_TELLING = 0.1  # change of a threshold since it was told last
TELL_EVERY_S = 1.0
MOST_UNTAKEN = 100  # later ones drive out earlier ones


class SparseDecisions:
    """Tells a decision if a threshold has moved far, if shedding begins or ends, or if advice is new."""

    def __init__(self) -> None:
        self._told, self._told_s = LadderState(), float("-inf")
        self._refused = 0  # requests, until then
        self._number = 0
        self._open: list[tuple[float, BrownoutDecision]] = []  # whose result is not known yet
        self._untaken: list[BrownoutDecision] = []

    def note(self, now_s: float, at: float, ladder: Ladder, refused: int = 0) -> bool:
        """Take note of the ladder's last decision.

        Args:
            now_s: the time of the decision.
            at: the same, in seconds since 1970.
            ladder: that decided.
            refused: requests so far.

        Returns:
            True if it is told.
        """
        self._measure(now_s, ladder)
        rung, told = ladder.rung, self._told
        # Shedding may have begun and ended since.
        is_over = refused > self._refused and not (rung.shedding or told.shedding)
        if now_s < self._told_s + TELL_EVERY_S or not (_is_news(rung, told) or is_over):
            return False
        self._number += 1
        decision = BrownoutDecision(
            number=self._number,
            at=at,
            reason=_reason(rung, told, ladder.policy.mode, is_over=is_over),
            mode=ladder.policy.mode,
            prefill_before=told.thresholds.prefill,
            prefill=rung.thresholds.prefill,
            decode_before=told.thresholds.decode,
            decode=rung.thresholds.decode,
            shedding=rung.shedding,
            refused=refused - self._refused,
            scale=rung.scale,
            inputs=replace(
                rung.inputs,
                ttft_p90_s=ladder.windows["prefill"].p90_s(now_s),
                tpot_p90_s=ladder.windows["decode"].p90_s(now_s),
            ),
            predicted_ttft_s=rung.ttft_s,
            predicted_tpot_s=rung.tpot_s,
        )
        self._told, self._told_s, self._refused = rung, now_s, refused
        self._open.append((now_s, decision))
        self._tell(decision)
        return True

    def take(self) -> list[BrownoutDecision]:
        """Return what there is to tell since the last call, without names of a worker."""
        taken, self._untaken = self._untaken, []
        return taken

    def has_more(self, rung: LadderState) -> bool:
        """True if there will be something to tell, even if ``rung`` does not change."""
        return bool(self._open) or _is_news(rung, self._told)

    def _measure(self, now_s: float, ladder: Ladder) -> None:
        """Tell decisions again whose window has passed."""
        for made_s, decision in [*self._open]:
            until_s = made_s + ladder.policy.window_s
            if now_s < until_s:
                break
            self._open.pop(0)
            first, later = (ladder.windows[phase].between_s(made_s, until_s) for phase in PHASES)
            self._tell(replace(decision, measured_ttft_s=first, measured_tpot_s=later))

    def _tell(self, decision: BrownoutDecision) -> None:
        self._untaken = [*self._untaken, decision][-MOST_UNTAKEN:]


def _is_news(rung: LadderState, told: LadderState) -> bool:
    moved = max(abs(a - b) for a, b in zip(rung.thresholds, told.thresholds, strict=True))
    is_exact_again = rung.thresholds == EXACT != told.thresholds
    return (
        moved >= WORTH_TELLING - 1e-9
        or is_exact_again
        or rung.shedding != told.shedding
        or bool(rung.scale) > bool(told.scale)
    )


def _reason(rung: LadderState, told: LadderState, mode: BrownoutMode, *, is_over: bool) -> str:
    """Say why ``rung`` is unlike what was told last."""
    if mode in ("off", "manual"):
        return f"mode {mode}"
    reasons = []
    if sum(rung.thresholds) < sum(told.thresholds):
        by_paper = mode == "paper"
        reasons.append("latencies are above a target" if by_paper else "a target would be missed")
    elif rung.thresholds != told.thresholds:
        reasons.append("there is room below the targets")
    if rung.shedding and not told.shedding:
        reasons.append("the queue takes longer than the target, at the lowest thresholds")
    elif is_over or (told.shedding and not rung.shedding):
        reasons.append("the queue is short again")
    reasons += [f"a lone request misses the target of {phase}" for phase in rung.unreachable]
    return "; ".join(reasons)
