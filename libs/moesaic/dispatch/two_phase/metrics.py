"""Metrics of two phases."""

from prometheus_client import Counter

from moesaic.dispatch.two_phase.choice.chooser import RoundChoice

ROUNDS = Counter("moesaic_exchange_rounds", "Layers by the way they were exchanged", ["way", "why"])
PREDICTED = Counter(
    "moesaic_exchange_predicted_seconds", "What these exchanges should have taken", ["way"]
)
TAKEN = Counter("moesaic_exchange_taken_seconds", "What they took", ["way"])
MESSAGES = Counter(
    "moesaic_exchange_messages",
    "Messages between attention and expert workers, both ways",
    ["link"],
)
FALLBACKS = Counter(
    "moesaic_exchange_fallbacks", "Exchanges that were repeated directly", ["cause"]
)


def count_round(choice: RoundChoice) -> None:
    """Count a round of this node, or a worker's rows that went directly."""
    ROUNDS.labels(choice.way, choice.why).inc()


def note_seconds(choice: RoundChoice, taken_s: float) -> None:
    """Count the seconds that a worker waited for its sums, neighbours included, beside the prediction."""
    if choice.predicted_s:
        PREDICTED.labels(choice.way).inc(choice.predicted_s[choice.way])
        TAKEN.labels(choice.way).inc(taken_s)
