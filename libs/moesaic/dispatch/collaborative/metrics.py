"""Metrics of a site: where the choices of its rows were computed, and how its links are."""

from prometheus_client import Counter, Gauge

CHOICES = Counter(
    "moesaic_site_choices",
    "Choices of this site's rows, by where their experts were: in slots here (local), in memory from files (cached), "
    "read from files for them (loaded), or on another site (remote)",
    ["where"],
)
REMOTE_CALLS = Counter(
    "moesaic_site_remote_calls",
    "Messages with rows of one layer that another site answered",
    ["peer"],
)
FALLBACKS = Counter(
    "moesaic_site_fallbacks",
    "Messages that a peer failed, so that another source took its rows",
    ["peer"],
)
AWAY_S = Counter(
    "moesaic_site_away_seconds",
    "Waiting for other sites or files, beyond what computes here meanwhile",
)
LAYERS_S = Counter("moesaic_site_layer_seconds", "Experts of all layers, from the gate to the sum")
LINK_RTT_S = Gauge("moesaic_site_link_rtt_seconds", "Round trip of an empty message", ["peer"])
LINK_BYTES_PER_S = Gauge(
    "moesaic_site_link_bytes_per_second", "Bandwidth, there and back together", ["peer"]
)
PEER_ROW_S = Gauge(
    "moesaic_site_peer_row_seconds", "Queue and computation of one row at another site", ["peer"]
)
