"""The operating point: all that decides whether a burst is more than a machine can take, in one place to turn."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BurstPoint:
    """An operating point. Rates are shares of the capacity measured in the run, so they scale to the machine.

    Attributes:
        topology: topology of the suite.
        wider: copies of each neuron of the demo model's experts. With one they are so small that fewer of them make
            hardly anything faster; see ``benchmarks.common.wide_experts``.
        max_num_seqs: sequences in one step.
        way: experts that share one united expert, in the arms that degrade; 0: degraded choices are dropped.
        calm_share: rate before and after the burst, as a share of the capacity.
        burst_factor: the rate in the burst over the calm one.
        target_factor: targets over the 90th percentiles of the calm latencies measured in the run.
        kinds: families and forms of questions, as the card of the demo model has them; they decide how long prompts and
            answers are. All are asked freely, and answered token by token.
        questions_of_a_kind: drawn at most; they are asked again when none is left.
        max_tokens: most tokens of an answer.
        calm_s: before the burst.
        burst_s: seconds of the burst.
        tail_s: seconds of calm after the burst.
        capacity_s: seconds of the closed loop that measures the capacity.
        targets_s: seconds of the calm stretch that targets are taken from.
        settle_s: most seconds after the last answer that thresholds may take to be 1 again.
    """

    topology: str = "local"
    wider: int = 8
    max_num_seqs: int = 32
    way: int = 0
    calm_share: float = 0.57
    burst_factor: float = 2.0
    target_factor: float = 5.0
    kinds: tuple[tuple[str, str], ...] = (
        ("sum of two digits", "chat"),
        ("sum of three digits", "chat"),
        ("product", "chat"),
        ("dates", "chat"),
        ("who", "chat"),
        ("how many", "chat"),
    )
    questions_of_a_kind: int = 200
    max_tokens: int = 96
    calm_s: float = 75.0
    burst_s: float = 175.0
    tail_s: float = 50.0
    capacity_s: float = 20.0
    targets_s: float = 40.0
    settle_s: float = 60.0

    @property
    def burst_end_s(self) -> float:
        """Seconds from the start of an arm to the end of its burst."""
        return self.calm_s + self.burst_s

    @property
    def end_s(self) -> float:
        """Seconds in which requests arrive."""
        return self.burst_end_s + self.tail_s
