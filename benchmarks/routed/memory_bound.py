"""Suites of a model with experts that no cache holds."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.suite import RunningSuite, running_suite
from benchmarks.engine.bench import SHAPE as ENGINE_SHAPE
from benchmarks.engine.bench import make_model
from moesaic.messages.scheduling import ExpertScheduling

# An expert has 3 MiB of weights; each worker reads from 768 MiB.
SHAPE: dict[str, Any] = ENGINE_SHAPE | {
    "num_hidden_layers": 4,
    "num_experts": 64,
    "moe_intermediate_size": 512,
}
SIDES: tuple[ExpertScheduling, ...] = ("aebs", "static", "random", "random-per-row")


@contextmanager
def memory_bound_suites() -> Iterator[Mapping[str, RunningSuite]]:
    """Run a suite for each way to choose replicas: two expert workers, each with all experts."""
    slots = ("--experts", "2", "--slots-per-layer", str(SHAPE["num_experts"]))
    with tempfile.TemporaryDirectory(prefix="moesaic-bench-") as name, ExitStack() as running:
        make_model(Path(name), SHAPE)
        flags = ("--model", name, "--served-model-name", "demo", *slots)
        yield {
            side: running.enter_context(running_suite(*flags, MOESAIC_EXPERT_SCHEDULING=side))
            for side in SIDES
        }
