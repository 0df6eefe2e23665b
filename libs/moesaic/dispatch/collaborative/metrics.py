"""Metrics of a site: where the choices of its rows were computed, and how its links are."""

from prometheus_client import Counter, Gauge

CHOICES = Counter(
    "moesaic_site_choices",
    "Expert choices of this site's rows by source: slots here (local), memory (cached), "
    "files (loaded), or another site (remote)",
    ["where"],
)
REMOTE_CALLS = Counter(
    "moesaic_site_remote_calls",
    "Messages with rows of one layer that other sites answered",
    ["peer"],
)
FALLBACKS = Counter(
    "moesaic_site_fallbacks",
    "Messages that failed at a peer and whose rows another source computed",
    ["peer"],
)
AWAY_S = Counter(
    "moesaic_site_away_seconds",
    "Time spent waiting for other sites or files after the local experts finished",
)
LAYERS_S = Counter(
    "moesaic_site_layer_seconds", "Time spent on experts of all layers, from the gate to the sum"
)
LINK_RTT_S = Gauge("moesaic_site_link_rtt_seconds", "Round-trip time of an empty message", ["peer"])
LINK_BYTES_PER_S = Gauge(
    "moesaic_site_link_bytes_per_second", "Bandwidth of both directions together", ["peer"]
)
PEER_ROW_S = Gauge(
    "moesaic_site_peer_row_seconds", "Time to queue and compute one row at another site", ["peer"]
)
