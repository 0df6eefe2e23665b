"""Attention workers of two ranks, with a GPU each: answers beside a CPU's, and tokens a second, captured and eager.

The model is the demo model, so a step computes next to nothing: the rates show what the messages of ranks cost.
"""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.serving import ServedArm, served
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
NOTES = (
    "eager: --no-decode-graphs, where the first rank tells the others each layer's rows",
    "degraded: with --topology local, kernel by kernel in all ranks",
)


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """Serve the demo model in every arm, three times or once; what there is to tell after each."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < DEVICES:
        raise CommandError(
            f"gpu-ranks needs {DEVICES} CUDA devices, and a torch that was built for them; got {found}",
            Exit.UNHEALTHY,
        )
    return served(ARMS, quick, NOTES)
