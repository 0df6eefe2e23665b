"""What exchanges count."""

from prometheus_client import Counter

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
