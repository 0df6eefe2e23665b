"""Metrics of two phases."""

from prometheus_client import Counter

ROUNDS = Counter(
    "moesaic_exchange_rounds", "Layers by the exchange that carried their rows", ["way"]
)
MESSAGES = Counter(
    "moesaic_exchange_messages",
    "Messages between attention and expert workers in both directions",
    ["link"],
)
FALLBACKS = Counter(
    "moesaic_exchange_fallbacks", "Exchanges that failed and were repeated directly", ["cause"]
)
