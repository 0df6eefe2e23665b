"""The recorded trace that benchmarks schedule and place."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common.routing_traces import DEMO_TRACE, KINDS, demo_trace
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.digest import weights_digest
from moesaic_lab.placement.trace_report import halves

DEMO = Path(__file__).parents[3] / "models" / "demo"


def test_the_recorded_trace_is_of_the_demo_model_and_of_several_task_sets() -> None:
    weights = weights_digest(Checkpoint(DEMO).files)
    trace, config = demo_trace(), replace(load_config(DEMO), weights_digest=weights)

    assert trace.model_digest == config.digest
    assert (trace.num_experts, trace.top_k) == (config.moe.num_experts, config.moe.top_k)
    assert trace.layers == tuple(config.moe_layers)
    assert len(trace.parts) >= 6
    for part in trace.parts:
        for phases in KINDS.values():
            assert trace.selected([part], phases)
    assert DEMO_TRACE.stat().st_size < 4 << 20


def test_no_row_of_it_chooses_an_expert_twice() -> None:
    for step in demo_trace().steps:
        ids = np.sort(step.topk_ids, axis=2)
        assert (ids[:, :, 1:] != ids[:, :, :-1]).all()


def test_both_halves_of_it_have_steps_of_all_sizes() -> None:
    seen, held_out = halves(demo_trace(), ["decode"])

    for half in (seen, held_out):
        sizes = [step.topk_ids.shape[1] for step in half]
        assert sizes.count(8) > 100
        assert sizes.count(32) > 100
