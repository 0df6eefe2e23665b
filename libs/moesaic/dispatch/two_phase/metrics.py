"""Metrics of two phases."""

from prometheus_client import Counter

ROUNDS = Counter("moesaic_exchange_rounds", "Layers by the way they were exchanged", ["way"])
MESSAGES = Counter(
    "moesaic_exchange_messages",
    "Messages between attention and expert workers, both ways",
    ["link"],
)
FALLBACKS = Counter(
    "moesaic_exchange_fallbacks", "Exchanges that were repeated directly", ["cause"]
)
