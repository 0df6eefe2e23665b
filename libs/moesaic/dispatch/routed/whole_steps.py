"""Steps that are one call each, with experts in other processes."""

import ctypes
import time
from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client import Counter
from torch import Tensor

from moesaic.dispatch.contract import Step
from moesaic.dispatch.routed.asking import RoutedStep
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.errors import MoesaicError
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.whole_steps import WholeSteps
from moesaic.native.structs import ApartArgs
from moesaic.telemetry.metrics import series
from moesaic.telemetry.tallied import TalliedHistogram

EXCHANGE_BOUNDS_S = tuple(10e-6 * 1.25**n for n in range(36))  # to 25 ms
EXCHANGES = TalliedHistogram(
    "moesaic_layer_exchange_seconds",
    "Time of the exchange of a layer, from sending rows to the sum of all replies, without "
    "overlap with other parts of the step",
    EXCHANGE_BOUNDS_S,
)
BEYOND = TalliedHistogram(
    "moesaic_layer_beyond_computation_seconds",
    "Time of the exchange of a layer without the computation that its slowest expert worker "
    "reports",
    EXCHANGE_BOUNDS_S,
)
PARTS_S = Counter(
    "moesaic_step_part_seconds",
    "Time of the parts of a routed step: attention and other dense layers, sending rows, "
    "waiting for replies, summing them, and Python",
    ["part"],
)
MOST_LEFT_OUT = 64  # steps
FLOAT_BYTES = 4  # rows that pass C functions are float32
# Each part reads its experts' weights anew: of fewer rows that takes longer than the overlap saves, 1.5 times at 8
# rows, 1.2 at 32 and 1.1 to 1.16 from 128 to 255. At 512 they took 0.77 on one day and 1.05 on another
# (docs/measured/apart.md).
TWO_PARTS_ROWS = 256


class RoutedSteps:
    """Computes steps without Python between their layers, as long as nothing rare happens."""

    def __init__(self, dispatcher: RoutedDispatcher, whole: WholeSteps, hidden_size: int) -> None:
        """Compute by ``whole`` on the routes of ``dispatcher``."""
        self._dispatcher, self._whole, self._hidden_size = dispatcher, whole, hidden_size
        self._took_s = 0.0  # the last step
        # In a row; steps for Python before the next try.
        self._failures = self._left_out = 0

    @property
    def layers_done(self) -> int:
        """Number of layers computed so far, of all parts; grows while a step runs."""
        return self._whole.layers_done

    def num_parts(self, num_rows: int) -> int:
        """See ``Shortcut.num_parts``: of two, attention of one overlaps experts of the other."""
        return 2 if num_rows >= TWO_PARTS_ROWS else 1

    async def forward(self, step: Step, batches: Sequence[StepBatch]) -> Tensor | None:
        """Compute the parts of a step side by side.

        Returns:
            float32 ``[R, vocab]``; ``None``: the step has to be computed layer by layer. Its
            partial results have changed nothing.

        Raises:
            ExpertUnavailable: see ``Dispatcher.dispatch``.
            StaleEpoch: the same.
        """
        assert isinstance(step, RoutedStep)
        native = self._dispatcher.native
        if self._left_out:
            self._left_out -= 1
            return None
        asks = native.asks_of(step.route, self._hidden_size)
        promised = any(batch.promised is not None for batch in batches)
        if asks is None or not self._dispatcher.goes_directly(
            step.route, asks.by_layer, promised=promised
        ):
            return None
        await self._dispatcher.link_peers(self._took_s)
        started = time.perf_counter()
        times = _LayerTimes(len(batches) * len(asks.by_layer))
        apart = native.apart(asks, step.step_id)
        times.fill(apart)
        logits, failed = self._whole.forward_apart(batches, apart)
        native.note(apart)
        self._took_s = time.perf_counter() - started
        if failed is None:
            self._failures = 0
            num_rows = sum(len(batch.token_ids) for batch in batches)
            times.count(apart)
            _count_parts(apart, self._took_s)
            waited_s = sum(getattr(apart, f"{part}_ns") for part in ("send", "wait", "sum")) * 1e-9
            nbytes = num_rows * self._hidden_size * FLOAT_BYTES
            tally = self._dispatcher.waits
            tally.count_all(step.route, nbytes, waited_s, times.beyond_s(apart))
            return logits
        # Python settles what failed, so that nothing is awaited any more, and tells of errors. If there is
        # none, workers have decided differently, or have not been asked for this layer before.
        left = [
            (
                part.layer,
                native.unsettled(asks, step.step_id, part.layer, part.seq, part.deadline_ns),
            )
            for part in failed
            if part.layer >= 0
        ]
        found = [(layer, each, await each.outcomes()) for layer, each in left]
        for layer, each, outcomes in found:
            for link, outcome in zip(each.ask.links, outcomes, strict=True):
                if isinstance(outcome, MoesaicError):
                    raise self._dispatcher.failure(step, layer, link, outcome)
        # What was computed is lost: if that happens again and again, Python asks at once for a while.
        self._failures += 1
        self._left_out = min(2**self._failures, MOST_LEFT_OUT)
        return None


class _LayerTimes:
    """Times of the exchanges of one step, in ns."""

    def __init__(self, most: int) -> None:
        self._took, self._beyond = (ctypes.c_int64 * most)(), (ctypes.c_int64 * most)()

    def fill(self, apart: ApartArgs) -> None:
        """Have a step write them."""
        apart.exchange_ns = ctypes.addressof(self._took)
        apart.beyond_ns = ctypes.addressof(self._beyond)

    def beyond_s(self, apart: ApartArgs) -> float:
        """Add up what exchanges took without the computation of the slowest worker."""
        return sum(self._beyond[: apart.num_exchanges]) * 1e-9

    def count(self, apart: ApartArgs) -> None:
        """Add them to the metrics."""
        for histogram, times in ((EXCHANGES, self._took), (BEYOND, self._beyond)):
            counts, total_ns = [0] * (len(EXCHANGE_BOUNDS_S) + 1), 0
            for each in times[: apart.num_exchanges]:
                counts[bisect_left(EXCHANGE_BOUNDS_S, each * 1e-9)] += 1
                total_ns += each
            histogram.add(counts, total_ns * 1e-9)


def _count_parts(apart: ApartArgs, took_s: float) -> None:
    rest_s = took_s
    for part in ("attend", "send", "wait", "sum"):
        part_s = getattr(apart, f"{part}_ns") * 1e-9
        rest_s -= part_s
        series(PARTS_S, part).inc(part_s)
    series(PARTS_S, "python").inc(max(0.0, rest_s))
