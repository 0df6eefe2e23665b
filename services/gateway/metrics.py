"""Metrics of the gateway.

Labels come from closed sets: route templates, the served model's name, error codes, the tenants that have keys.
"""

import asyncio
from collections import defaultdict

from prometheus_client import Counter, Gauge, Histogram

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TTFT_TAIL = (20, 40, 80, 160, 640, 2560)
_ITL = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_E2E = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)
_BY = ["route", "model"]

# outcome: done, errored, cancelled
requests = Counter("moesaic_requests", "Requests by outcome", [*_BY, "status", "outcome"])
e2e_s = Histogram(
    "moesaic_e2e_request_latency_seconds",
    "Time from the first byte of a request to the last byte of its answer",
    _BY,
    buckets=_E2E,
)
ttft_s = Histogram(
    "moesaic_time_to_first_token_seconds",
    "Time to the first token or score",
    _BY,
    buckets=_TTFT + _TTFT_TAIL,
)
itl_s = Histogram(
    "moesaic_inter_token_latency_seconds", "Time between tokens of one answer", _BY, buckets=_ITL
)
prompt_tokens = Counter("moesaic_prompt_tokens", "Tokens of accepted prompts", _BY)
prompt_tokens_cached = Counter(
    "moesaic_prompt_tokens_cached", "Prompt tokens that workers had in their prefix cache", _BY
)
answers_finished = Counter(
    "moesaic_answers_finished", "Generated answers that ended, by finish reason", ["reason"]
)
generation_tokens = Counter("moesaic_generation_tokens", "Tokens generated", _BY)
tenant_requests = Counter(
    "moesaic_tenant_requests", "Requests of each tenant by outcome", ["tenant", "outcome"]
)
# kind: prompt, output
tenant_tokens = Counter(
    "moesaic_tenant_tokens", "Tokens of each tenant's requests", ["tenant", "kind"]
)
loop_lag_s = Histogram(
    "moesaic_gateway_loop_lag_seconds",
    "Delay of the event loop, sampled 50 times a second",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
inflight = Gauge("moesaic_requests_inflight", "Requests in flight")
rejections = Counter(
    "moesaic_admission_rejections", "Requests rejected before any work", ["reason"]
)
truncations = Counter(
    "moesaic_stream_truncations",
    "Streams that ended without a finish reason or an error; must stay 0",
)
duplicates = Counter("moesaic_stream_duplicates_dropped", "Repeated tokens that were dropped")
reruns = Counter("moesaic_reruns", "Sequences continued by another attention worker", ["cause"])
router_decisions = Counter(
    "moesaic_router_decisions", "Sequences assigned to an attention worker", ["policy"]
)
router_cached_tokens = Counter(
    "moesaic_router_cached_tokens", "Prompt tokens expected to be cached at the chosen worker"
)
router_spills = Counter(
    "moesaic_router_spills", "Sequences routed past a full worker that holds more of their prefix"
)
router_gaps = Counter(
    "moesaic_router_gaps", "Missed block changes of a worker that were requested again"
)
router_queued = Gauge("moesaic_router_queued", "Sequences waiting for an attention worker")
router_index_blocks = Gauge("moesaic_router_index_blocks", "KV blocks known to be cached")
workers = Gauge("moesaic_attention_workers_connected", "Attention workers that can take requests")


LOOK_EVERY_S = 0.05


async def watch_loop() -> None:
    """Measure the lag of the event loop by the excess of short sleeps, until cancelled.

    All that the gateway does waits for the loop, probes too.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOK_EVERY_S
        await asyncio.sleep(LOOK_EVERY_S)
        loop_lag_s.observe(max(0.0, loop.time() - due))


def sums(
    metric: Counter | Histogram, kind: str, by: str = "", **only: str
) -> defaultdict[str, float]:
    """Sum up the series of a metric. Those of probes and pages, which name no model, do not count.

    Args:
        metric: that is read.
        kind: of its samples: ``total``, or ``bucket`` and ``sum`` of a histogram.
        by: label whose values have a sum each; without it there is one, of the empty text.
        only: values of labels that a series must have to count.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for family in metric.collect():
        for sample in family.samples:
            labels = sample.labels
            counts = labels.get("model", "all") and only.items() <= labels.items()
            if counts and sample.name.endswith(f"_{kind}"):
                found[labels.get(by, "")] += sample.value
    return found
