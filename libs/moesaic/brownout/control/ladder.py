"""The ladder of defence against more work than there is time for, and the decisions worth telling. Pure.

===========  =======================================================================================
State        Entered when
===========  =======================================================================================
queue        always: a request waits its turn
degrade      mode ``paper``: by measured latencies; ``auto``: by predicted ones
shed         mode ``auto``: no lower threshold helps, and a new request would wait for more than
             ``SHED_ABOVE`` of the time that the TTFT target leaves. Standard requests are refused,
             until a new request would wait for less than ``SHED_BELOW`` of that time
exact waits  an exact request is never degraded or shed; it is refused if it would wait longer than
             ``exact_wait_s``
scale        advice alone: shedding or degrading has lasted for ``SCALE_AFTER_S``
===========  =======================================================================================
"""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from moesaic.brownout.control.contract import (
    EXACT,
    PHASES,
    Latency,
    Phase,
    QueueState,
    StepTaken,
    Thresholds,
)
from moesaic.brownout.control.latencies import LatencyWindow
from moesaic.brownout.control.paper import paper_thresholds
from moesaic.brownout.control.predictive import Arrivals, Prediction, PredictiveControl
from moesaic.errors import Overloaded
from moesaic.messages.brownout import BrownoutDecision, BrownoutInputs, BrownoutMode, BrownoutPolicy

# Of the longest wait with which a first token is in time: where shedding begins and ends.
SHED_ABOVE, SHED_BELOW = 0.9, 0.6
MOST_SHARED = 2.0  # times the ``served_s`` of a request, which are two or three steps
SCALE_AFTER_S = 30.0
NO_INPUTS = BrownoutInputs()
LEAST_RETRY_S, MOST_RETRY_S = 0.5, 30.0
WORTH_TELLING = 0.1  # change of a threshold since it was told last
TELL_EVERY_S = 1.0
MOST_UNTAKEN = 100  # later ones drive out earlier ones


@dataclass(frozen=True)
class LadderState:
    """The state of the ladder after one decision.

    Attributes:
        thresholds: thresholds from now on.
        shedding: new standard requests are refused.
        retry_after_s: time after which refused requests should be tried again.
        wait_s: wait of a request that came now; 0: unknown.
        unreachable: phases whose target a lone request misses at the lowest thresholds.
        scale: advice to add capacity; empty: none.
        inputs: observations behind the decision.
        ttft_s: predicted 90th percentile; ``None``: nothing is predicted.
        tpot_s: likewise.
    """

    thresholds: Thresholds = EXACT
    shedding: bool = False
    retry_after_s: float = LEAST_RETRY_S
    wait_s: float = 0.0
    unreachable: tuple[Phase, ...] = ()
    scale: str = ""
    inputs: BrownoutInputs = NO_INPUTS
    ttft_s: float | None = None
    tpot_s: float | None = None


class Ladder:
    """Decides by one policy, for one engine.

    Attributes:
        policy: in force.
        state: of the last decision.
        windows: latencies of each phase.
        arrivals: of requests; told by the engine.
    """

    def __init__(self, policy: BrownoutPolicy) -> None:
        self.windows: dict[Phase, LatencyWindow] = {
            phase: LatencyWindow(policy.window_s) for phase in PHASES
        }
        self.state = LadderState()
        self._troubled_since_s: float | None = None
        self.policy = policy
        self.arrivals = Arrivals()
        self._predictive = PredictiveControl(policy, self.arrivals)

    def set_policy(self, policy: BrownoutPolicy) -> None:
        """Decide by ``policy`` from now on; measured latencies and speed are kept."""
        self.policy = policy
        for window in self.windows.values():
            window.window_s = policy.window_s
        self._predictive = PredictiveControl(policy, self.arrivals, self._predictive.speed)

    def note_latency(self, phase: Phase, now_s: float, seconds: float, *, exact: bool) -> None:
        """Record the latency of a first token (prefill) or of a later one (decode).

        Args:
            phase: phase of the token.
            now_s: time of the token.
            seconds: since the request was submitted, or since the token before.
            exact: the request must not be degraded.
        """
        target_s = self._target_s(phase, exact=exact)
        self.windows[phase].add(Latency(now_s, seconds, seconds / target_s))

    def note_step(self, step: StepTaken, step_rows: int) -> None:
        """Record a step that had room for ``step_rows`` of prompts."""
        self._predictive.stepped(step, step_rows)

    def admit(self, *, exact: bool) -> None:
        """Let a request join the queue, or refuse it.

        Raises:
            Overloaded: it is shed, or would wait for too long; the error says when to retry.
        """
        state, policy = self.state, self.policy
        if not exact:
            if state.shedding:
                raise Overloaded(
                    f"shed: the queue takes {state.wait_s:.2f} s at the lowest thresholds, but the target for "
                    f"a first token is {policy.slo_ttft_s:g} s",
                    state.retry_after_s,
                )
        elif policy.mode == "auto" and state.wait_s > policy.exact_wait_s:
            raise Overloaded(
                f"an exact request would wait {state.wait_s:.2f} s, but at most "
                f"{policy.exact_wait_s:g} s are allowed",
                state.retry_after_s,
            )

    def decide(self, state: QueueState) -> LadderState:
        """Decide for the steps from now on."""
        prediction = self._predicted(state)
        thresholds, before = prediction.thresholds, self.state
        shedding = self._sheds(prediction)
        too_long_s = prediction.wait_s - SHED_BELOW * self._most_wait_s(prediction)
        retry_s = min(MOST_RETRY_S, max(LEAST_RETRY_S, too_long_s))
        self.state = LadderState(
            thresholds,
            shedding,
            math.ceil(retry_s * 10) / 10,
            prediction.wait_s,
            prediction.unreachable,
            self._advice(state.now_s, thresholds, shedding=shedding),
            self._inputs(state) if self.policy.mode in ("paper", "auto") else before.inputs,
            prediction.ttft_s,
            prediction.tpot_s,
        )
        return self.state

    def _predicted(self, state: QueueState) -> Prediction:
        policy, before = self.policy, self.state
        if policy.mode == "off":
            return Prediction(EXACT)
        if policy.mode == "manual":
            return Prediction(Thresholds(policy.prefill_threshold, policy.decode_threshold))
        least = Thresholds(policy.min_prefill_threshold, policy.min_decode_threshold)
        current = Thresholds(*map(max, before.thresholds, least))
        if policy.mode == "paper":
            return Prediction(paper_thresholds(policy, state.now_s, current, self.windows))
        return self._predictive.decide(state, current, self.windows)

    def _sheds(self, prediction: Prediction) -> bool:
        if self.policy.mode != "auto" or "prefill" in prediction.unreachable:
            return False
        share = prediction.wait_s / self._most_wait_s(prediction)
        if self.state.shedding:
            return share > SHED_BELOW
        return prediction.at_lowest and share > SHED_ABOVE

    def _most_wait_s(self, prediction: Prediction) -> float:
        """Longest wait before its prompt that a request may have.

        At least the time of ``MOST_SHARED`` lone requests, even where the target leaves less. Steps compute
        requests that wait together, so refusing some would not let others begin earlier.
        """
        served_s = prediction.served_s
        return max(self.policy.slo_ttft_s - served_s, MOST_SHARED * served_s)

    def _advice(self, now_s: float, thresholds: Thresholds, *, shedding: bool) -> str:
        if self.policy.mode not in ("paper", "auto") or not (shedding or thresholds != EXACT):
            self._troubled_since_s = None
            return ""
        if self._troubled_since_s is None:
            self._troubled_since_s = now_s
        lasted_s = now_s - self._troubled_since_s
        if lasted_s < SCALE_AFTER_S:
            return ""
        return (
            "add workers: requests have been " + ("shed" if shedding else "degraded") + " for long"
        )

    def _inputs(self, state: QueueState) -> BrownoutInputs:
        gains = self._predictive.speed.gains
        return BrownoutInputs(
            waiting_requests=state.waiting_requests,
            waiting_tokens=state.waiting_tokens,
            oldest_wait_s=state.oldest_wait_s,
            answers=state.answers,
            arriving_tokens_per_s=self.arrivals.tokens.per_s(state.now_s),
            prefill_gain=gains.prefill,
            decode_gain=gains.decode,
        )

    def _target_s(self, phase: Phase, *, exact: bool) -> float:
        policy = self.policy
        if phase == "prefill":
            return (exact and policy.exact_slo_ttft_s) or policy.slo_ttft_s
        return (exact and policy.exact_slo_tpot_s) or policy.slo_tpot_s


class SparseDecisions:
    """Reports a decision if a threshold has moved far, if shedding begins or ends, or if advice is new."""

    def __init__(self) -> None:
        self._told, self._told_s = LadderState(), float("-inf")
        self._refused = 0  # requests, until then
        self._number = 0
        self._open: list[tuple[float, BrownoutDecision]] = []  # whose result is not known yet
        self._untaken: list[BrownoutDecision] = []

    def note(self, now_s: float, at: float, ladder: Ladder, refused: int = 0) -> bool:
        """Record the ladder's last decision.

        Args:
            now_s: time of the decision.
            at: the same, in seconds since 1970.
            ladder: the ladder that decided.
            refused: requests refused so far.

        Returns:
            True if the decision is reported.
        """
        self._measure(now_s, ladder)
        state, told = ladder.state, self._told
        # Shedding may have begun and ended since.
        is_over = refused > self._refused and not (state.shedding or told.shedding)
        if now_s < self._told_s + TELL_EVERY_S or not (_is_news(state, told) or is_over):
            return False
        self._number += 1
        decision = BrownoutDecision(
            number=self._number,
            at=at,
            reason=_reason(state, told, ladder.policy.mode, is_over=is_over),
            mode=ladder.policy.mode,
            prefill_before=told.thresholds.prefill,
            prefill=state.thresholds.prefill,
            decode_before=told.thresholds.decode,
            decode=state.thresholds.decode,
            shedding=state.shedding,
            refused=refused - self._refused,
            scale=state.scale,
            inputs=replace(
                state.inputs,
                ttft_p90_s=ladder.windows["prefill"].p90_s(now_s),
                tpot_p90_s=ladder.windows["decode"].p90_s(now_s),
            ),
            predicted_ttft_s=state.ttft_s,
            predicted_tpot_s=state.tpot_s,
        )
        self._told, self._told_s, self._refused = state, now_s, refused
        self._open.append((now_s, decision))
        self._tell(decision)
        return True

    def take(self) -> list[BrownoutDecision]:
        """Return the reports since the last call, without names of a worker."""
        taken, self._untaken = self._untaken, []
        return taken

    def has_more(self, state: LadderState) -> bool:
        """True if there will be something to report, even if ``state`` does not change."""
        return bool(self._open) or _is_news(state, self._told)

    def _measure(self, now_s: float, ladder: Ladder) -> None:
        """Report decisions again whose window has passed."""
        for made_s, decision in [*self._open]:
            until_s = made_s + ladder.policy.window_s
            if now_s < until_s:
                break
            self._open.pop(0)
            first, later = (ladder.windows[phase].between_s(made_s, until_s) for phase in PHASES)
            self._tell(replace(decision, measured_ttft_s=first, measured_tpot_s=later))

    def _tell(self, decision: BrownoutDecision) -> None:
        self._untaken = [*self._untaken, decision][-MOST_UNTAKEN:]


def _is_news(state: LadderState, told: LadderState) -> bool:
    moved = max(abs(a - b) for a, b in zip(state.thresholds, told.thresholds, strict=True))
    is_exact_again = state.thresholds == EXACT != told.thresholds
    return (
        moved >= WORTH_TELLING - 1e-9
        or is_exact_again
        or state.shedding != told.shedding
        or bool(state.scale) > bool(told.scale)
    )


def _reason(state: LadderState, told: LadderState, mode: BrownoutMode, *, is_over: bool) -> str:
    """Say how ``state`` differs from the last one reported."""
    if mode in ("off", "manual"):
        return f"mode {mode}"
    reasons = []
    if sum(state.thresholds) < sum(told.thresholds):
        by_paper = mode == "paper"
        reasons.append("latencies are above a target" if by_paper else "a target would be missed")
    elif state.thresholds != told.thresholds:
        reasons.append("there is room below the targets")
    if state.shedding and not told.shedding:
        reasons.append("the queue takes longer than the target, at the lowest thresholds")
    elif is_over or (told.shedding and not state.shedding):
        reasons.append("the queue is short again")
    reasons += [f"a lone request misses the target of {phase}" for phase in state.unreachable]
    return "; ".join(reasons)
