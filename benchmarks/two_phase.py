"""What exchanging rows in two phases brings where nodes are joined by a slow link (JANUS section 3.2).

Two attention nodes and two expert nodes, two workers on each: eight processes in four network
namespaces, with the kernel's token bucket on every link between them. Inside a node they share memory,
between nodes they have UCX over TCP. All attention workers run steps at the same time; timed is
``dispatch`` of a layer, from rows to their sums, gate and (small) experts included.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.shaped_network import NoNamespaces, ShapedNetwork, shaped_network
from models.training.network import Network, Shape
from moesaic.cli.outcome import CommandError, Exit
from moesaic.dispatch.exchange.costs import LinkCosts, predict
from moesaic.dispatch.exchange.costs import Shape as CostShape
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.models.config import load_config

NODES = {"a0": ("attention", 2), "a1": ("attention", 2), "e0": ("expert", 2), "e1": ("expert", 2)}
SHAPE = Shape(
    vocab_size=64,
    hidden_size=1024,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=16,
    top_k=2,
    expert_size=64,
    max_positions=64,
)
BATCHES = (16, 64, 256, 512)  # rows of all attention workers together
RATES_MBIT = (200, 1000)
RUN_S = 1.0  # about, of going directly
MODES = ("direct", "case-1", "case-2", "auto")
WITHIN = 1.05  # of the fastest measured: as good as the fastest
PAPER = {"tpot_change_at_batch_512": -0.18}  # JANUS Fig. 10, Base+2PC against Base
ANSWER_S = 120.0


def run(quick: bool) -> dict[str, Any]:
    """Measure every rate, batch and way, interleaved; skip where namespaces cannot be had."""
    try:
        with shaped_network(list(NODES)) as network, tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory))
            return asyncio.run(_measure(network, Path(directory), quick))
    except NoNamespaces as error:
        raise CommandError(
            f"two-phase needs network namespaces and tc, as root: {error}", Exit.UNHEALTHY
        ) from error


def make_model(directory: Path) -> None:
    """A random Qwen3-MoE checkpoint of ``SHAPE``."""
    from safetensors.torch import save_file

    special: dict[str, int | None] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    (directory / "config.json").write_text(json.dumps(SHAPE.hf_config(special)))
    save_file(Network(SHAPE).hf_tensors(), directory / "model.safetensors", {"format": "pt"})


class Fleet:
    """The eight workers, as the bench talks to them."""

    def __init__(self) -> None:
        self.hellos: list[dict[str, Any]] = []
        self._lines: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.complete = asyncio.Event()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A worker has come."""
        self.hellos.append(json.loads(await reader.readline()))
        self._lines.append((reader, writer))
        if len(self.hellos) == sum(count for _, count in NODES.values()):
            self.complete.set()

    async def tell(self, role: str, **order: Any) -> list[dict[str, Any]]:
        """Give all workers of a role the same order at the same time; their answers."""
        lines = [
            line
            for hello, line in zip(self.hellos, self._lines, strict=True)
            if hello["role"] == role
        ]
        return await asyncio.gather(*(_ask(line, order) for line in lines))

    async def place(self, model: Path) -> None:
        """Give every expert to one worker, and tell the attention workers who is on their node."""
        experts = [hello for hello in self.hellos if hello["role"] == "expert"]
        experts.sort(key=lambda hello: str(hello["name"]))
        config, num = load_config(model), len(experts)
        placement = Placement(
            epoch=1,
            model_digest=config.digest,
            num_experts=SHAPE.num_experts,
            workers=[
                PlacedWorker(
                    worker_id=hello["name"],
                    generation=1,
                    admin_address="",
                    data_address=hello["address"],
                    node=hello["node"],
                )
                for hello in experts
            ],
            layers=list(config.moe_layers),
            slots=[
                [list(range(n, SHAPE.num_experts, num)) for n in range(num)]
                for _ in config.moe_layers
            ],
        )
        wire = msgspec.to_builtins(placement)
        await self.tell("expert", do="place", placement=wire, neighbours=[])
        for hello, line in zip(self.hellos, self._lines, strict=True):
            if hello["role"] == "attention":
                near = [
                    (other["name"], 1, other["address"])
                    for other in self.hellos
                    if other["node"] == hello["node"] and other is not hello
                ]
                await _ask(line, {"do": "place", "placement": wire, "neighbours": near})


async def _ask(
    line: tuple[asyncio.StreamReader, asyncio.StreamWriter], order: dict[str, Any]
) -> dict[str, Any]:
    reader, writer = line
    writer.write(json.dumps(order).encode() + b"\n")
    answer = await asyncio.wait_for(reader.readline(), ANSWER_S)
    if not answer:
        raise CommandError("two-phase: a worker died; its error is above")
    return dict(json.loads(answer))


@asynccontextmanager
async def _fleet(network: ShapedNetwork, model: Path) -> AsyncIterator[Fleet]:
    fleet, control = Fleet(), model / "control"
    server = await asyncio.start_unix_server(fleet.take, str(control), limit=1 << 26)
    told = {
        "prefix": network.prefix,
        "nodes": NODES,
        "model": str(model),
        "control": str(control),
    }
    with _processes(json.dumps(told)):
        await asyncio.wait_for(fleet.complete.wait(), ANSWER_S)
        await fleet.place(model)
        yield fleet
    server.close()


@contextmanager
def _processes(told: str) -> Iterator[None]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "benchmarks.two_phase_workers", told]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


async def _measure(network: ShapedNetwork, model: Path, quick: bool) -> dict[str, Any]:
    rates, batches = ((200,), (16, 256)) if quick else (RATES_MBIT, BATCHES)
    rounds = 1 if quick else 3
    figures: dict[str, Any] = {}
    async with _fleet(network, model) as fleet:
        for rate in rates:
            network.shape(rate)
            figures[f"{rate}_mbit"] = await _measure_rate(fleet, rate, batches, rounds)
    cells = [cell for rate in figures.values() for name, cell in rate.items() if name[0].isdigit()]
    return {
        "config": {
            "nodes": NODES,
            "hidden_size": SHAPE.hidden_size,
            "experts": SHAPE.num_experts,
            "expert_size": SHAPE.expert_size,
            "dtype": "float32",
            "rounds": rounds,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "figures": {
            "share_of_cells_auto_goes_the_fastest": _share(cells, 1.0),
            "share_of_cells_auto_goes_within_5_percent": _share(cells, WITHIN),
            "share_of_cells_link_costs_alone_choose_the_fastest": round(
                sum(cell["model"]["chosen_to_fastest"] <= 1 for cell in cells) / len(cells), 3
            ),
            **figures,
        },
        "paper": PAPER,
        "notes": [
            "ms: median of layers, of all attention workers; least and greatest median of a round behind it",
            "the paper's figure is of TPOT with attention, on GPUs with NVLink inside nodes; this is of a "
            "layer's exchange alone, in processes that share few cores",
            *(["quick: one rate, two batches, one round, the same code path"] if quick else []),
        ],
    }


async def _measure_rate(
    fleet: Fleet, rate_mbit: int, batches: tuple[int, ...], rounds: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for mode in MODES:
            await fleet.tell("attention", do="mode", mode=mode)
            if mode != "direct":
                costs = await fleet.tell("attention", do="measured")
                found.setdefault("link_costs", costs[0]["costs"])
            for batch in batches:
                rows, steps = batch // 4, _steps(batch, rate_mbit)
                await fleet.tell("attention", do="run", rows=rows, steps=steps // 3)
                answers = await fleet.tell("attention", do="run", rows=rows, steps=steps)
                runs.setdefault((batch, mode), []).append(_merged(answers))
    for batch in batches:
        cell = _cell({mode: runs[batch, mode] for mode in MODES})
        found[f"{batch}_rows"] = cell | _of_model(cell, batch, found["link_costs"])
    return found


def _steps(batch: int, rate_mbit: int) -> int:
    """As many as go in ``RUN_S`` if links are all that takes time; half a batch is a node's, and
    goes to four workers and back."""
    layer_s = 2 * 4 * batch / 2 * SHAPE.hidden_size * 4 / (rate_mbit * 125e3)
    return min(60, max(4, round(RUN_S / (SHAPE.num_layers * layer_s))))


def _merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    counted = {
        name: sum(answer["counted"][name] for answer in answers) for name in answers[0]["counted"]
    }
    layers = [seconds for answer in answers for seconds in answer["layers_s"]]
    return {"layers_s": layers, "counted": counted, "layers": len(answers[0]["layers_s"])}


def _cell(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One rate and batch: every way, and which one auto has gone."""
    cell: dict[str, Any] = {}
    for mode, rounds in runs.items():
        medians = [1e3 * statistics.median(run["layers_s"]) for run in rounds]
        layers = [s for run in rounds for s in run["layers_s"]]
        counted = {k: sum(run["counted"][k] for run in rounds) for k in rounds[0]["counted"]}
        cell[mode] = {
            "ms": round(1e3 * statistics.median(layers), 3),
            "ms_of_rounds": [round(min(medians), 3), round(max(medians), 3)],
            "messages_between_nodes_per_layer": round(
                counted["inter_messages"] / sum(run["layers"] for run in rounds), 2
            ),
        }
        if mode == "auto":
            cell[mode] |= _of_auto(counted)
        elif counted[f"taken {mode}"]:
            share = counted[f"predicted {mode}"] / counted[f"taken {mode}"]
            cell[mode]["predicted_to_measured"] = round(share, 3)
    told = {mode: cell[mode]["ms"] for mode in MODES if mode != "auto"}
    cell["fastest"] = min(told, key=told.__getitem__)
    cell["auto"]["went_to_fastest"] = round(told[cell["auto"]["went"]] / min(told.values()), 3)
    cell["auto_to_direct"] = round(cell["auto"]["ms"] / cell["direct"]["ms"], 3)
    return cell


def _of_model(cell: dict[str, Any], batch: int, costs: dict[str, Any]) -> dict[str, Any]:
    """What the link costs alone say, before anything is learned, for all of a node's rows at once."""
    nbytes = batch // 2 * SHAPE.hidden_size * 4
    shape = CostShape(2, (2, 2), 0, nbytes, nbytes)
    model_s = predict(shape, msgspec.convert(costs, LinkCosts))
    told = min(model_s, key=model_s.__getitem__)
    return {
        "model": {
            "ms": {case: round(1e3 * seconds, 3) for case, seconds in model_s.items()},
            "chooses": told,
            "chosen_to_fastest": round(cell[told]["ms"] / cell[cell["fastest"]]["ms"], 3),
        }
    }


def _of_auto(counted: dict[str, float]) -> dict[str, Any]:
    gone = {
        case: sum(counted[f"rounds {case} {why}"] for why in ("faster", "exploring"))
        for case in MODES[:3]
    }
    gone["direct"] /= 2  # each worker counts one, the others one for both workers of a node
    taken = sum(counted[f"taken {case}"] for case in gone)
    return {
        "went": max(gone, key=gone.__getitem__),
        "rounds_of_a_node": gone,
        "predicted_to_measured": round(
            sum(counted[f"predicted {case}"] for case in gone) / taken, 3
        )
        if taken
        else None,
    }


def _share(cells: list[dict[str, Any]], within: float) -> float:
    """Of cells in which auto has mostly gone the fastest way, or one as good as that."""
    good = sum(cell["auto"]["went_to_fastest"] <= within for cell in cells)
    return float(round(good / len(cells), 3))
