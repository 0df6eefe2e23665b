"""The ladder of defence against more work than there is time for, in one place. Pure.

===========  =======================================================================================
Rung         Entered when
===========  =======================================================================================
queue        always: a request waits its turn
degrade      mode ``paper``: by measured latencies; ``auto``: by predicted ones
shed         mode ``auto``: no lower threshold helps, and a request that came now would wait for more than
             ``SHED_ABOVE`` of the time that the target of TTFT leaves; until it would wait for less than
             ``SHED_BELOW`` of it. Standard requests are refused
exact waits  an exact request is never degraded or shed; it is refused if it would wait longer than
             ``exact_wait_s``
scale        advice alone: shedding or degrading has lasted for ``SCALE_AFTER_S``
===========  =======================================================================================
"""

import math
from dataclasses import dataclass

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
from moesaic.brownout.control.paper import PaperControl
from moesaic.brownout.control.predictive import Prediction, PredictiveControl
from moesaic.errors import Overloaded
from moesaic.messages.brownout import BrownoutInputs, BrownoutPolicy

# Of the longest wait with which a first token is in time: where shedding begins and ends.
SHED_ABOVE, SHED_BELOW = 0.9, 0.6
MOST_SHARED = 2.0  # times the ``served_s`` of a request, which are two or three steps
SCALE_AFTER_S = 30.0
NO_INPUTS = BrownoutInputs()
LEAST_RETRY_S, MOST_RETRY_S = 0.5, 30.0


@dataclass(frozen=True)
class LadderState:
    """The state of the ladder after one decision.

    Attributes:
        thresholds: from now on.
        shedding: new standard requests are refused.
        retry_after_s: for those that are refused.
        wait_s: that a request would have ahead of it now; 0: unknown.
        unreachable: phases whose target a lone request misses at the lowest thresholds.
        scale: advice to add capacity; empty: none.
        inputs: the decision was made from.
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
        rung: of the last decision.
        windows: latencies of each phase.
    """

    def __init__(self, policy: BrownoutPolicy) -> None:
        self.windows: dict[Phase, LatencyWindow] = {
            phase: LatencyWindow(policy.window_s) for phase in PHASES
        }
        self.rung = LadderState()
        self._troubled_since_s: float | None = None
        self.policy = policy
        self._paper, self._predictive = PaperControl(policy), PredictiveControl(policy)

    def set_policy(self, policy: BrownoutPolicy) -> None:
        """Decide by ``policy`` from now on; what was learned of latencies and speed is kept."""
        self.policy = policy
        for window in self.windows.values():
            window.window_s = policy.window_s
        self._paper = PaperControl(policy)
        self._predictive = PredictiveControl(policy, self._predictive)

    def note_latency(self, phase: Phase, now_s: float, seconds: float, *, exact: bool) -> None:
        """Take note of a first token (prefill) or of a later one (decode).

        Args:
            phase: of the token.
            now_s: its time.
            seconds: since the request was submitted, or since the token before.
            exact: the request must not be degraded.
        """
        target_s = self._target_s(phase, exact=exact)
        self.windows[phase].add(Latency(now_s, seconds, seconds / target_s))

    def note_arrival(self, now_s: float, tokens: int) -> None:
        """Take note of a request, refused or not, with so many tokens in its prompt."""
        self._predictive.arrived(now_s, tokens)

    def note_beginning(self, tokens: int, cached: int) -> None:
        """Take note of a prompt that begins, and of those of its tokens whose KV was there."""
        self._predictive.began(tokens, cached)

    def note_end(self, tokens: int) -> None:
        """Take note of an answer of so many tokens that has ended."""
        self._predictive.ended(tokens)

    def note_step(self, step: StepTaken, step_rows: int) -> None:
        """Take note of a step that might have had ``step_rows`` of prompts."""
        self._predictive.stepped(step, step_rows)

    def admit(self, *, exact: bool) -> None:
        """Let a request join the queue, or refuse it.

        Raises:
            Overloaded: it is shed, or would wait for too long; with the time after which to retry.
        """
        rung, policy = self.rung, self.policy
        if not exact:
            if rung.shedding:
                raise Overloaded(
                    f"shed: the queue takes {rung.wait_s:.2f} s at the lowest thresholds, the target of "
                    f"a first token is {policy.slo_ttft_s:g} s",
                    rung.retry_after_s,
                )
        elif policy.mode == "auto" and rung.wait_s > policy.exact_wait_s:
            raise Overloaded(
                f"an exact request would wait for {rung.wait_s:.2f} s, at most "
                f"{policy.exact_wait_s:g} s are allowed",
                rung.retry_after_s,
            )

    def decide(self, state: QueueState) -> LadderState:
        """Decide for the steps from now on."""
        prediction = self._predicted(state)
        thresholds, before = prediction.thresholds, self.rung
        shedding = self._sheds(prediction)
        too_long_s = prediction.wait_s - SHED_BELOW * self._most_wait_s(prediction)
        retry_s = min(MOST_RETRY_S, max(LEAST_RETRY_S, too_long_s))
        self.rung = LadderState(
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
        return self.rung

    def _predicted(self, state: QueueState) -> Prediction:
        policy, before = self.policy, self.rung
        if policy.mode == "off":
            return Prediction(EXACT)
        if policy.mode == "manual":
            return Prediction(Thresholds(policy.prefill_threshold, policy.decode_threshold))
        least = Thresholds(policy.min_prefill_threshold, policy.min_decode_threshold)
        current = Thresholds(*map(max, before.thresholds, least))
        if policy.mode == "paper":
            now_s = state.now_s
            return Prediction(self._paper.decide(now_s, current, self.windows))
        return self._predictive.decide(state, current, self.windows)

    def _sheds(self, prediction: Prediction) -> bool:
        if self.policy.mode != "auto" or "prefill" in prediction.unreachable:
            return False
        share = prediction.wait_s / self._most_wait_s(prediction)
        if self.rung.shedding:
            return share > SHED_BELOW
        return prediction.at_lowest and share > SHED_ABOVE

    def _most_wait_s(self, prediction: Prediction) -> float:
        """Longest wait before its prompt that a request may have.

        Where the target leaves hardly any, as long as ``MOST_SHARED`` lone requests take: steps compute those
        who wait together, so to refuse some would not let others begin earlier.
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
            arriving_tokens_per_s=self._predictive.arriving_per_s(state.now_s),
            prefill_gain=gains.prefill,
            decode_gain=gains.decode,
        )

    def _target_s(self, phase: Phase, *, exact: bool) -> float:
        policy = self.policy
        if phase == "prefill":
            return (exact and policy.exact_slo_ttft_s) or policy.slo_ttft_s
        return (exact and policy.exact_slo_tpot_s) or policy.slo_tpot_s
