"""Metrics of the engine, for operators."""

import time

from prometheus_client import Counter, Gauge, Histogram

from moesaic.engine.computing import Computed
from moesaic.engine.observer import Observer
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.queues import LONG_STEP_ROWS, PlannedStep
from moesaic.engine.steps.sweeps import Slice
from moesaic.errors import MoesaicError
from moesaic.telemetry.metrics import counter

OBSERVE_EVERY_S = 0.05  # a step of one row would spend a hundredth of its time on gauges

STEP_SECONDS = Histogram(
    "moesaic_step_seconds",
    "Duration of one forward pass",
    buckets=[0.001 * 2**i for i in range(14)],
)
STEP_ROWS = Histogram(
    "moesaic_step_rows", "Rows of one forward pass", buckets=[2**i for i in range(14)]
)
STEP_RETRIES = Counter("moesaic_step_retries_total", "Forward passes that failed and were retried")
LIGHT_STEPS = Counter(
    "moesaic_light_steps_total",
    "Forward passes for tenants with little work while other tenants wait",
)
SLICE_SECONDS = Histogram(
    "moesaic_sweep_slice_seconds",
    "Time of a slice of rows in one layer, for scoring without stored KV",
    buckets=[0.001 * 2**i for i in range(14)],
)
SWEEP_BLOCKS_USED = Gauge("moesaic_sweep_blocks_used", "Blocks in use by scoring without stored KV")
RUNNING = Gauge("moesaic_num_requests_running", "Requests being computed")
WAITING = Gauge("moesaic_num_requests_waiting", "Requests waiting to be computed")
BLOCKS = Gauge("moesaic_kv_blocks", "KV blocks in total")
BLOCKS_USED = Gauge("moesaic_kv_blocks_used", "KV blocks in use")
BLOCKS_CACHED = Gauge(
    "moesaic_kv_blocks_cached", "Free KV blocks that still hold a reusable prefix"
)
PREFIX_QUERIES = Counter(
    "moesaic_prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache"
)
PREFIX_HITS = Counter("moesaic_prefix_cache_hits_total", "Prompt tokens found in the prefix cache")
PREEMPTIONS = Counter(
    "moesaic_num_preemptions_total",
    "Generations preempted, which gave up their KV blocks or their place in the batch",
)
DISPLACED = Counter(
    "moesaic_requests_displaced_total",
    "Requests evicted from a full queue for more urgent ones, or for tenants with fewer "
    "queued requests",
)
ROWS_ALLOWED = Gauge(
    "moesaic_step_prompt_rows_allowed",
    "Prompt rows allowed in a step, from the duration of the last steps",
)
BROWNOUT_THRESHOLD = Gauge(
    "moesaic_brownout_threshold_ratio",
    "Share of expert choices that stay exact; 1 is exact",
    ["phase"],
)
BROWNOUT_P90 = Gauge(
    "moesaic_brownout_latency_p90_seconds",
    "90th percentile over the policy's window: time to the first token (prefill) or between "
    "later ones (decode)",
    ["phase"],
)
BROWNOUT_SHEDDING = Gauge(
    "moesaic_brownout_shedding", "1 while new standard requests are refused, else 0"
)
BROWNOUT_SHED = counter(
    "moesaic_brownout_shed_requests_total",
    "Requests shed to keep others within their target, by requested quality",
    *("quality", "exact", "standard"),
)
BROWNOUT_DECISIONS = Counter(
    "moesaic_brownout_decisions_total",
    "Decisions sent to workers that changed a threshold or shedding",
)
BROWNOUT_CHOICES = Counter("moesaic_brownout_choices", "Expert choices of computed rows", ["phase"])
BROWNOUT_DEGRADED_CHOICES = Counter(
    "moesaic_brownout_degraded_choices",
    "Expert choices served by other experts; way 0: without united experts, or with them "
    "only for lost experts",
    ["phase", "layer", "way"],
)
BROWNOUT_DEGRADED = Gauge(
    "moesaic_brownout_degraded_ratio", "Share of recent expert choices served by other experts"
)


class StepMetrics(Observer):
    """Sets the metrics of one engine's steps and queues."""

    def __init__(self, batcher: Batcher) -> None:
        """Observe the queues of ``batcher``."""
        self._batcher, self._observed_s = batcher, 0.0
        BLOCKS.set(batcher.pool.num_blocks)

    def began(self, planned: PlannedStep | Slice) -> None:
        """Set the gauges now and then, and before a long step."""
        is_long = planned.num_rows >= LONG_STEP_ROWS
        if is_long or time.monotonic() >= self._observed_s + OBSERVE_EVERY_S:
            self._observe()

    def ended(self, planned: PlannedStep | Slice, computed: Computed, took_s: float) -> None:
        """Count the step."""
        if isinstance(planned, Slice):
            SLICE_SECONDS.observe(took_s)
            return
        STEP_SECONDS.observe(took_s)
        STEP_ROWS.observe(planned.num_rows)
        LIGHT_STEPS.inc(planned.is_light)

    def failed(self, planned: PlannedStep | Slice, error: Exception) -> None:
        """Count the step, if it is run again."""
        if isinstance(error, MoesaicError):
            STEP_RETRIES.inc()

    def paused(self) -> None:
        """Set the gauges."""
        self._observe()

    def resumed(self) -> None:
        """Set the gauges again when the next step begins."""
        self._observed_s = 0.0

    def _observe(self) -> None:
        self._observed_s = time.monotonic()
        RUNNING.set(self._batcher.num_running)
        WAITING.set(self._batcher.num_waiting)
        SWEEP_BLOCKS_USED.set(self._batcher.sweeps.area.num_used)
        BLOCKS_USED.set(self._batcher.pool.num_used)
        BLOCKS_CACHED.set(self._batcher.pool.num_cached)
        ROWS_ALLOWED.set(self._batcher.pace.rows())
        tally = self._batcher.tally.take()
        PREEMPTIONS.inc(tally.preemptions)
        DISPLACED.inc(tally.displaced)
        PREFIX_QUERIES.inc(tally.prefix_queries_tokens)
        PREFIX_HITS.inc(tally.prefix_hits_tokens)
