"""Metrics of gathering experts."""

from prometheus_client import Counter, Gauge, Histogram

WAIT_SECONDS = Counter(
    "moesaic_gather_wait_seconds",
    "Time that layers waited for their experts: transfers that computing did not hide",
    ["layer"],
)
LAYERS = Counter("moesaic_gather_layers", "Layers computed with gathered experts", ["layer"])
GATHERED_BYTES = Counter(
    "moesaic_gather_fetched_bytes", "Packed experts that came, by where from", ["source"]
)
GATHER_SECONDS = Histogram(
    "moesaic_gather_fetch_seconds",
    "Time to bring one layer's experts",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
FAILED_PULLS = Counter(
    "moesaic_gather_failed_pulls", "Pulls that a peer failed, and another source made up for"
)
DAMAGED_PULLS = Counter(
    "moesaic_gather_damaged_pulls", "Those of them whose bytes were not as when they were digested"
)
HIDING_ROWS = Gauge(
    "moesaic_gather_hiding_rows", "Rows of a step whose computing hides the transfers"
)
SLOWDOWN = Gauge(
    "moesaic_gather_slowdown", "The slowest layer's time over that of the first, as calibrated"
)
SATURATION_FLOPS = Gauge(
    "moesaic_gather_saturation_flops", "Work of a step that hides the slowest transfer"
)
