"""Metrics of gathering experts."""

from prometheus_client import Counter, Gauge, Histogram

WAIT_SECONDS = Counter(
    "moesaic_gather_wait_seconds",
    "Time that layers waited for their experts, in transfers that computation did not hide",
    ["layer"],
)
LAYERS = Counter("moesaic_gather_layers", "Layers computed with gathered experts", ["layer"])
GATHERED_BYTES = Counter(
    "moesaic_gather_fetched_bytes", "Bytes of packed experts received, by source", ["source"]
)
GATHER_SECONDS = Histogram(
    "moesaic_gather_fetch_seconds",
    "Time to fetch the experts of one layer to the memory of the host",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
)
FAILED_PULLS = Counter(
    "moesaic_gather_failed_pulls", "Pulls that failed at a peer and were served by another source"
)
DAMAGED_PULLS = Counter(
    "moesaic_gather_damaged_pulls", "Failed pulls whose bytes did not match their digest"
)
HIDING_ROWS = Gauge(
    "moesaic_gather_hiding_rows", "Rows of a step whose computation hides the transfers"
)
SLOWDOWN = Gauge(
    "moesaic_gather_slowdown_ratio",
    "Calibrated time of the slowest layer, relative to the first layer",
)
SATURATION_FLOPS = Gauge(
    "moesaic_gather_saturation_flops",
    "Work of a step that hides the slowest transfer, in floating-point operations",
)
