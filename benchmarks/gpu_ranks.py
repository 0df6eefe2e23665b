"""Attention workers of two ranks, with a GPU each: answers beside a CPU's, and tokens a second, captured and eager.

The model is the demo model, so a step computes next to nothing: the rates show what the messages of ranks cost.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common.suite import running_suite
from benchmarks.serving import TEXTS, ServedArm, measured, texts_of
from moesaic.cli.terminal.outcome import CommandError, Exit

DEVICES = 2
LOCAL = ("--topology", "local", "--attention", "1")
APART = ("--topology", "disaggregated", "--attention", "1", "--experts", "1")
RANKS = ("--tensor-parallel", str(DEVICES))
EAGER = {"MOESAIC_DECODE_GRAPHS": "false"}
ARMS = {
    "local, one rank": ServedArm(LOCAL),
    "local, two ranks": ServedArm((*LOCAL, *RANKS)),
    "local, two ranks, eager": ServedArm((*LOCAL, *RANKS), EAGER),
    "disaggregated, two ranks": ServedArm((*APART, *RANKS)),
    "disaggregated, two ranks, eager": ServedArm((*APART, *RANKS), EAGER),
}


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """Serve the demo model in every arm, three times or once; what there is to tell after each."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < DEVICES:
        raise CommandError(
            f"gpu-ranks needs {DEVICES} CUDA devices, and a torch that was built for them; got {found}",
            Exit.UNHEALTHY,
        )
    return _served(1 if quick else 3)


def _served(rounds: int) -> Iterator[dict[str, Any]]:
    with running_suite("--topology", "local", "--devices", "cpu") as suite:
        expected = asyncio.run(texts_of(suite, TEXTS))
    figures: dict[str, Any] = {}
    for name, arm in ARMS.items():
        figures[name] = measured(arm, expected, rounds)
        yield _result(figures, rounds)


def _result(figures: dict[str, Any], rounds: int) -> dict[str, Any]:
    wrong = [name for name, arm in figures.items() if not arm.get("same_answers_as_a_cpu")]
    return {
        "config": {"device": torch.cuda.get_device_name(), "rounds": rounds, "dtype": "float32"},
        "figures": figures,
        "notes": [
            "tokens/s over REST, medians of the rounds: generated ones, their prompts in the time; prefill: of prompts",
            "eager: --no-decode-graphs, where the first rank tells the others each layer's rows",
            "degraded: with --topology local, kernel by kernel in all ranks",
        ],
        "failed": f"no answer, or another than a CPU's: {', '.join(wrong)}" if wrong else None,
    }
