"""The policy of brownout, as operators set it, and the decisions of workers."""

import math
from typing import Literal, get_args

import msgspec

from moesaic.errors import InvalidInput
from moesaic.messages.bounds import Count, Name, Number, Share, SmallCount
from moesaic.messages.order import Order
from moesaic.messages.substitution import MOST_WAY, Rule, Substitution

BrownoutMode = Literal["off", "manual", "paper", "auto"]
"""``off``: every choice is computed by its own expert. ``manual``: the thresholds that operators set.
``paper``: algorithm 2 of BrownoutServe. ``auto``: by predicted latencies, and requests are shed where that
does not suffice."""

MODES: tuple[BrownoutMode, ...] = get_args(BrownoutMode)
RULES: tuple[Rule, ...] = get_args(Rule)
LONGEST_S = 3600.0


class BrownoutPolicy(Order, frozen=True, kw_only=True, tag="brownout-policy.v1"):
    """Settings of operators; they outlive every scheduler. Defaults are the paper's, except for the
    mode.

    Attributes:
        mode: off, manual (given thresholds), paper (by measured latencies), or auto (by predicted latencies, with
            shedding if needed). Off is the default, so that nothing is degraded silently.
        prefill_threshold: in mode ``manual``: share of expert choices that stay exact for prompts, 0 to 1.
        decode_threshold: in mode ``manual``: share of expert choices that stay exact for generated tokens, 0 to 1.
        slo_ttft_s: target for 90 of 100 first tokens, queueing included, in seconds.
        slo_tpot_s: target for 90 of 100 later tokens, in seconds.
        exact_slo_ttft_s: target for first tokens of exact requests, in seconds; 0: that of standard requests.
        exact_slo_tpot_s: target for later tokens of exact requests, in seconds; 0: that of standard requests.
        exact_wait_s: longest predicted wait of an exact request, in seconds; requests over it are rejected.
        warning: in mode ``paper``: share of a target below which its threshold grows.
        increment: in mode ``paper``: step by which a threshold grows.
        shrink: in mode ``paper``: factor of a threshold while its target is missed.
        min_prefill_threshold: lowest threshold of prompts.
        min_decode_threshold: lowest threshold of generated tokens.
        window_s: time for which latencies count, in seconds.
        way: number of experts that share a united expert; 0: without united experts, tokens go to fewer experts.
        rule: experts that stay: those chosen by most rows (tokens), or equally many on each worker (instances).
    """

    mode: BrownoutMode = "off"
    prefill_threshold: float = 1.0
    decode_threshold: float = 1.0
    slo_ttft_s: float = 0.25
    slo_tpot_s: float = 0.15
    exact_slo_ttft_s: float = 0.0
    exact_slo_tpot_s: float = 0.0
    exact_wait_s: float = 30.0
    warning: float = 0.8
    increment: float = 0.1
    shrink: float = 0.8
    min_prefill_threshold: float = 0.0
    min_decode_threshold: float = 0.0
    window_s: float = 5.0
    way: int = 0
    rule: Rule = "tokens"

    @property
    def substitution(self) -> Substitution:
        """The way to degrade under this policy."""
        if self.mode == "off":
            return Substitution()
        if self.way:
            return Substitution(way=self.way, instead="united", rule=self.rule)
        return Substitution(instead="fewer", rule=self.rule)

    def checked(self) -> "BrownoutPolicy":
        """Return the policy itself, if it makes sense.

        Raises:
            InvalidInput: names the first wrong field, and its allowed values.
        """
        for field, (least, most) in _BOUNDS.items():
            value = getattr(self, field)
            if not (math.isfinite(value) and least <= value <= most):
                raise InvalidInput(field, f"must be in {least:g}..{most:g}, got {value:g}")
        if self.way and (self.way < 2 or self.way & (self.way - 1)):
            raise InvalidInput("way", f"must be 0 for none, or 2, 4, 8 and so on, got {self.way}")
        for field, values in (("mode", MODES), ("rule", RULES)):
            if getattr(self, field) not in values:
                known = ", ".join(values)
                raise InvalidInput(field, f"must be one of {known}, got {getattr(self, field)!r}")
        if self.mode == "manual":
            for phase in ("prefill", "decode"):
                least = getattr(self, f"min_{phase}_threshold")
                if getattr(self, f"{phase}_threshold") < least:
                    fix = f"must be at least min_{phase}_threshold, which is {least:g}"
                    raise InvalidInput(f"{phase}_threshold", fix)
        return self


_SHARE, _SECONDS = (0.0, 1.0), (0.001, LONGEST_S)
_BOUNDS: dict[str, tuple[float, float]] = {
    "prefill_threshold": _SHARE,
    "decode_threshold": _SHARE,
    "min_prefill_threshold": _SHARE,
    "min_decode_threshold": _SHARE,
    "slo_ttft_s": _SECONDS,
    "slo_tpot_s": _SECONDS,
    "exact_slo_ttft_s": (0.0, LONGEST_S),
    "exact_slo_tpot_s": (0.0, LONGEST_S),
    "exact_wait_s": (0.0, LONGEST_S),
    "warning": (0.01, 1.0),
    "increment": (0.001, 1.0),
    "shrink": (0.01, 0.99),
    "window_s": (0.1, 600.0),
    "way": (0, MOST_WAY),
}


class BrownoutHint(msgspec.Struct, frozen=True, kw_only=True, tag="brownout-hint.v1"):
    """The policy has changed; read it again."""

    mode: str


class BrownoutInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Observations behind a decision.

    Attributes:
        waiting_requests: requests that have not begun.
        waiting_tokens: prompt tokens to be computed.
        oldest_wait_s: longest wait of a request that has not begun.
        answers: generations that get a token in each step.
        arriving_tokens_per_s: prompt tokens that arrive, shed ones too.
        ttft_p90_s: 90th percentile of TTFT in the window; absent without first tokens.
        tpot_p90_s: likewise for TPOT.
        prefill_gain: assumed speed-up of prompts at threshold 0.
        decode_gain: likewise for generated tokens.
    """

    waiting_requests: SmallCount = 0
    waiting_tokens: Count = 0
    oldest_wait_s: float = 0.0
    answers: SmallCount = 0
    arriving_tokens_per_s: float = 0.0
    ttft_p90_s: float | None = None
    tpot_p90_s: float | None = None
    prefill_gain: float = 1.0
    decode_gain: float = 1.0


class BrownoutDecision(msgspec.Struct, frozen=True, kw_only=True, tag="brownout-decision.v1"):
    """One decision of one worker. It is reported again, under the same number, with its result.

    Attributes:
        number: counts the decisions of one start of a worker, from 1.
        worker_id: id of the worker.
        generation: generation of the worker's start.
        at: seconds since 1970 by the worker's clock, for people.
        reason: reason, for people.
        mode: mode of the policy.
        prefill_before: threshold that was reported last.
        prefill: threshold from now on.
        decode_before: likewise.
        decode: likewise.
        shedding: new standard requests are refused.
        refused: requests refused since the decision before.
        scale: advice to add capacity; empty: none.
        inputs: observations behind the decision.
        predicted_ttft_s: predicted 90th percentile of TTFT; absent: nothing was predicted.
        predicted_tpot_s: likewise for TPOT.
        measured_ttft_s: the result, measured in the window after the decision.
        measured_tpot_s: likewise.
    """

    number: Count
    worker_id: Name = ""
    generation: Count = 0
    at: Number = 0.0
    reason: str = ""
    mode: str = "off"
    prefill_before: Share = 1.0
    prefill: Share = 1.0
    decode_before: Share = 1.0
    decode: Share = 1.0
    shedding: bool = False
    refused: Count = 0
    scale: str = ""
    inputs: BrownoutInputs = BrownoutInputs()
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    measured_ttft_s: float | None = None
    measured_tpot_s: float | None = None

    @property
    def decision_id(self) -> str:
        """The unique name of the decision."""
        return f"{self.worker_id}/{self.generation}/{self.number}"
