"""The eight workers that ``benchmarks.two_phase.bench`` measures, as the bench talks to them: an order is one JSON
object a line, and so is its answer."""

import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.common.links import LinkedHosts
from benchmarks.common.models import qwen3_moe, write_model
from benchmarks.common.placements import placed_worker, placement_of
from benchmarks.two_phase.cells import WAYS
from moesaic.cli.terminal.outcome import CommandError
from moesaic.models.configuration.config import load_config

NODES = {"a0": ("attention", 2), "a1": ("attention", 2), "e0": ("expert", 2), "e1": ("expert", 2)}
SHAPE = qwen3_moe(
    vocab_size=64,
    hidden_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    max_position_embeddings=64,
)
ANSWER_S = 120.0


def make_model(directory: Path) -> None:
    """A random Qwen3-MoE checkpoint of ``SHAPE``."""
    write_model(directory, SHAPE)


@dataclass(frozen=True)
class Block:
    """Measurement of all attention workers in one stretch of time."""

    layer_s: float  # on average
    layers: float  # of a worker, those that do not count for ``layer_s`` included
    messages: float  # between nodes, of all workers
    gone: dict[str, float]  # exchanges of a node, by way


class TwoPhaseFleet:
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

    async def run(self, mode: str, rows: int, seconds: float, warm_share: float) -> "Block":
        """Let all attention workers run steps in one way for some time; what counts of it."""
        answers = await self.tell(
            "attention", do="run", mode=mode, rows=rows, seconds=seconds, warm_share=warm_share
        )
        counted = {
            name: sum(answer["counted"][name] for answer in answers)
            for name in answers[0]["counted"]
        }
        gone = {way: counted[f"rounds {way}"] for way in WAYS}
        # Each worker counts one, the others one for both workers of a node.
        gone["direct"] /= 2
        return Block(
            statistics.fmean(answer["layer_s"] for answer in answers),
            statistics.fmean(answer["layers"] for answer in answers),
            counted["inter_messages"],
            gone,
        )

    async def start_anew(self) -> None:
        """Forget what exchanges take."""
        await self.tell("attention", do="fresh")

    async def place(self, model: Path) -> None:
        """Give every expert to one worker, and tell the attention workers their neighbours."""
        experts = [hello for hello in self.hellos if hello["role"] == "expert"]
        experts.sort(key=lambda hello: str(hello["name"]))
        config, num = load_config(model), len(experts)
        placement = placement_of(
            [
                placed_worker(hello["name"], hello["address"], node=hello["node"])
                for hello in experts
            ],
            [list(range(n, SHAPE["num_experts"], num)) for n in range(num)],
            config.moe_layers,
            SHAPE["num_experts"],
            model_digest=config.digest,
        )
        wire = msgspec.to_builtins(placement)
        await self.tell("expert", do="place", placement=wire)
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
async def open_fleet(hosts: LinkedHosts, model: Path) -> AsyncIterator[TwoPhaseFleet]:
    """Start all workers, and place the experts."""
    fleet, control = TwoPhaseFleet(), model / "control"
    server = await asyncio.start_unix_server(fleet.take, str(control), limit=1 << 26)
    told = {
        "hosts": hosts.told(),
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
    command = [sys.executable, "-m", "benchmarks.two_phase.workers", told]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
