"""The operating point: servers, links, load and lengths of all parts, in one place to turn."""

from dataclasses import dataclass

POLICIES = ("uniform", "redundance", "smartmoe", "eplb", "dance", "optimal")
SETTINGS = ("specialised", "mixed")


@dataclass(frozen=True)
class EdgePoint:
    """An operating point.

    Attributes:
        memory: memory of each server for the model; experts get about 1 : 1 : 2.
        link: rate of the links, as ``moesaic up`` takes it.
        slow_bit_per_s: rate of the slow links.
        kv_blocks: KV blocks of each server.
        policies: compared in the table, ``eplb`` and ``optimal`` among them.
        settings: settings of the table.
        rounds: rounds of the table; every second one has the policies in reverse order.
        rate_per_s: requests of each server.
        max_tokens: most tokens of an answer.
        learn_s: seconds of traffic that placements are planned from.
        measure_s: seconds of one policy in one round, and of one threshold.
        steady_s: seconds of traffic before tasks change places; nothing should move in it.
        lead_s: seconds at its end that the arm without migration sees.
        shifted_s: seconds of traffic after tasks changed places.
        swap_rate_per_s: requests of each server while tasks change places.
        replan_interval_s: from plan to plan, while tasks change places.
        window_s: window of the counts that servers report to the scheduler.
        with_swap: tasks change places.
        thresholds: thresholds of brownout on slow links; none: links are never slow.
        seed: seed of the arrivals.
    """

    memory: tuple[str, ...] = ("57M", "57M", "76.5M")
    link: str = "500mbit"
    slow_bit_per_s: int = 50_000_000
    kv_blocks: int = 80
    policies: tuple[str, ...] = POLICIES
    settings: tuple[str, ...] = SETTINGS
    rounds: int = 2
    rate_per_s: float = 0.9
    max_tokens: int = 16
    learn_s: float = 25.0
    measure_s: float = 18.0
    steady_s: float = 100.0
    lead_s: float = 30.0
    shifted_s: float = 140.0
    swap_rate_per_s: float = 1.0
    replan_interval_s: float = 15.0
    window_s: float = 2.0
    with_swap: bool = True
    thresholds: tuple[float, ...] = (1.0, 0.6, 0.2)
    seed: int = 1

    @property
    def num_sites(self) -> int:
        """Servers."""
        return len(self.memory)
