"""Benchmark of rows in two phases where nodes are joined by a slow link (JANUS section 3.2).

There are two attention nodes and two expert nodes with two workers each: eight processes in four
network namespaces. The kernel's token bucket shapes every link between nodes; some links have
latency. Workers of a node share memory; nodes are connected by UCX over TCP. All attention workers
run steps at the same time. The measured time is ``dispatch`` of a layer, from rows to their sums,
gate and (small) experts included. It is the mean over the layers of a step, since the first one
waits for neighbours.

In every cell, short blocks of all ways take turns; ``benchmarks.two_phase.cells`` judges them.
"""

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.common.links import NoLinks, linked_hosts
from benchmarks.two_phase.cells import WAYS, judged, shares
from benchmarks.two_phase.fleet import NODES, SHAPE, TwoPhaseFleet, make_model, open_fleet
from moesaic.cli.terminal.console import say
from moesaic.cli.terminal.outcome import CommandError, Exit

MODES = (*WAYS, "auto")
REPETITIONS = 8
BLOCK_STEPS, BLOCK_S = 4, (0.4, 2.0)  # a block has about so many steps of the slowest way
FIRST_BLOCK_S = 0.4  # of each way, to find out how long steps take
WARM_SHARE = 0.25  # of a block, before anything counts: workers meet again
PAPER = {"tpot_change_at_batch_512": -0.18}  # JANUS Fig. 10, Base+2PC against Base


@dataclass(frozen=True)
class ShapedLink:
    """Rate and latency of the links that join the nodes."""

    rate_mbit: int  # 0: whatever the machine can do
    delay_ms: float = 0.0  # one way

    @property
    def name(self) -> str:
        """Name of the links, in figures."""
        rate = f"{self.rate_mbit}_mbit" if self.rate_mbit else "unlimited"
        return rate + (f"_{self.delay_ms:g}_ms" if self.delay_ms else "")


ROWS = (8, 32, 128, 512)
GRID = [
    (ShapedLink(200), ROWS),
    (ShapedLink(1000), ROWS),
    (ShapedLink(0), ROWS),
    (ShapedLink(200, delay_ms=2.0), ROWS),
]  # rows are those of all attention workers together
QUICK = [(ShapedLink(200), (16, 128))]


def run(quick: bool) -> dict[str, Any]:
    """Measure every cell; skip where namespaces cannot be had."""
    try:
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory))
            return asyncio.run(_measure(Path(directory), quick))
    except NoLinks as error:
        raise CommandError(
            f"two-phase needs network namespaces and tc, as root: {error}", Exit.UNHEALTHY
        ) from error


async def _measure(model: Path, quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    repetitions = 2 if quick else REPETITIONS
    # A delay is of all hosts' links from their start on.
    for delay_ms, grid in groupby(QUICK if quick else GRID, lambda cell: cell[0].delay_ms):
        with linked_hosts(list(NODES), delay_ms=delay_ms) as hosts:
            async with open_fleet(hosts, model) as fleet:
                for link, batches in grid:
                    hosts.shape(link.rate_mbit)
                    figures[link.name] = await _measure_link(fleet, link, batches, repetitions)
    cells = [cell for link in figures.values() for name, cell in link.items() if name[0].isdigit()]
    return {
        "config": {
            "nodes": NODES,
            "hidden_size": SHAPE["hidden_size"],
            "layers": SHAPE["num_hidden_layers"],
            "experts": SHAPE["num_experts"],
            "expert_size": SHAPE["moe_intermediate_size"],
            "dtype": "float32",
            "repetitions": repetitions,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "figures": {**shares(cells), **figures},
        "paper": PAPER,
        "notes": [
            "ms of a layer: median of blocks, the least and the greatest behind it; ratios: mean of those "
            "of blocks side by side, with its 95 % bounds",
            "right: the fastest way, or one not slower with 95 % confidence and within 5 %",
            "the paper's figure is of TPOT with attention, on GPUs with NVLink inside nodes; this is of a "
            "layer's exchange alone, in processes that share few cores",
            *(["quick: two cells, two repetitions, the same code path"] if quick else []),
        ],
    }


async def _measure_link(
    fleet: TwoPhaseFleet, link: ShapedLink, batches: Sequence[int], repetitions: int
) -> dict[str, Any]:
    await fleet.start_anew()
    found: dict[str, Any] = {}
    for batch in batches:
        cell = found[f"{batch}_rows"] = await _measure_cell(fleet, batch, repetitions)
        say(
            f"two-phase: {link.name}, {batch} rows: "
            + ", ".join(f"{mode} {cell[mode]['ms']:g}" for mode in MODES)
            + f" ms; went {cell['went']}, {'right' if cell['went_right'] else 'wrong'}"
        )
    return found


async def _measure_cell(fleet: TwoPhaseFleet, batch: int, repetitions: int) -> dict[str, Any]:
    rows = batch // sum(count for role, count in NODES.values() if role == "attention")
    layer_s = max([(await fleet.run(mode, rows, FIRST_BLOCK_S, 0.0)).layer_s for mode in MODES])
    block_s = min(max(BLOCK_STEPS * SHAPE["num_hidden_layers"] * layer_s, BLOCK_S[0]), BLOCK_S[1])
    blocks: dict[str, list[float]] = {mode: [] for mode in MODES}
    gone = dict.fromkeys(WAYS, 0.0)
    messages = dict.fromkeys(MODES, 0.0)
    layers = dict.fromkeys(MODES, 0.0)
    for repetition in range(repetitions):
        first = repetition % len(MODES)
        for mode in (*MODES[first:], *MODES[:first]):
            found = await fleet.run(mode, rows, block_s, WARM_SHARE)
            blocks[mode].append(found.layer_s)
            messages[mode] += found.messages
            layers[mode] += found.layers
            if mode == "auto":
                gone = {way: gone[way] + found.gone[way] for way in WAYS}
    cell = judged(blocks, max(gone, key=gone.__getitem__))
    for mode in MODES:
        cell[mode]["messages_between_nodes_per_layer"] = round(messages[mode] / layers[mode], 2)
    cell["auto"]["chosen_by_a_node"] = gone
    return cell
