"""The workers that ``benchmarks.two_phase.bench`` measures: one process each, on its node.

They run the code of the services: ``RoutedDispatcher`` with ``TwoPhaseDispatcher`` on the attention
side, ``ExpertHost`` behind ``ExpertRelay`` on the other. A process reads orders, one JSON object a
line, from a socket, and answers each with one.
"""

import asyncio
import ctypes
import json
import logging
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any, get_args

import msgspec
import structlog
import torch

from benchmarks.common.links import LinkedHosts
from moesaic.dispatch.links import Endpoint
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.two_phase import metrics
from moesaic.dispatch.two_phase.dispatcher import TwoPhaseDispatcher
from moesaic.dispatch.two_phase.relay import ExpertRelay
from moesaic.dispatch.two_phase.way import WAYS, Mode
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import Placement
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import Frame, FrameLimits
from moesaic.transport.ucx.network import UcxNetwork

CPU, FP32 = torch.device("cpu"), torch.float32
SECRET = b"benchmark"
TIMEOUT_S = 30.0
MODES: tuple[Mode, ...] = get_args(Mode)


class ExpertWorker:
    """Serves what it is placed with."""

    def __init__(self, name: str, node: str, address: str, model: Path) -> None:
        self.name, self.node, self.address = name, node, address
        self.checkpoint, self.config = Checkpoint(model), load_config(model)

    async def open(self) -> str:
        """Listen; where."""
        slots = self.config.moe.num_experts
        self.host = ExpertHost(self.checkpoint, self.config, self.name, slots, FP32, CPU)
        self.network = network_of(self.name, self.address, self.config)
        self.relay = ExpertRelay(
            self.name, self.network, self.host.answers.answer, self.host.epochs.placement
        )
        return await self.network.listen(self.address, 0, self.relay.answer)

    async def place(self, placement: Placement) -> dict[str, Any]:
        """Load experts."""
        self.host.loader.prepare(placement)
        self.host.epochs.commit(placement.epoch)
        return {}


class AttentionWorker:
    """Runs steps of layers without attention: rows go to the experts, and sums come back."""

    def __init__(self, name: str, node: str, address: str, model: Path) -> None:
        self.name, self.node, self.address = name, node, address
        self.config = load_config(model)
        self.gates = load_gates(Checkpoint(model), self.config, FP32, CPU)
        self.exchanges: dict[str, TwoPhaseDispatcher] = {}
        self.mode = "auto"

    async def open(self) -> str:
        """Listen; where."""
        self.network = network_of(self.name, self.address, self.config)
        self.dispatcher = RoutedDispatcher(self.network, self.gates, TIMEOUT_S)
        return await self.network.listen(self.address, 0, self._answer)

    async def _answer(self, request: Frame) -> Frame:
        return await self.exchanges[self.mode].answer(request)

    async def place(self, placement: Placement, neighbours: list[Endpoint]) -> dict[str, Any]:
        """Link to all expert workers."""
        self.neighbours = neighbours
        self.dispatcher.set_placement(placement)
        await self.dispatcher.reachable()
        return {}

    async def fresh(self) -> dict[str, Any]:
        """Exchange as if just started: nothing is known of what exchanges take."""
        for exchange in self.exchanges.values():
            await exchange.close()
        for mode in MODES:
            exchange = self.exchanges[mode] = TwoPhaseDispatcher(
                self.network,
                self.name,
                self.node,
                mode,
                TIMEOUT_S,
                self.dispatcher.route_of,
            )
            exchange.set_neighbours(self.neighbours)
        self._go("auto")
        return {}

    def _go(self, mode: str) -> None:
        self.mode = mode
        self.dispatcher.use(self.exchanges[mode])

    async def run(self, mode: str, rows: int, seconds: float, warm_share: float) -> dict[str, Any]:
        """Run steps in one way for some time; seconds of a layer, and what was counted meanwhile."""
        self._go(mode)
        before, began_s = counted(), time.perf_counter()
        steps: list[tuple[float, list[float]]] = []
        while (now_s := time.perf_counter()) < began_s + seconds or len(steps) < 2:
            steps.append((now_s, await self._step(rows)))
        after = counted()
        warm = [step for at_s, step in steps if at_s >= began_s + warm_share * seconds]
        layers = [layer_s for step in warm or [steps[-1][1]] for layer_s in step]
        return {
            "layer_s": statistics.fmean(layers),
            "layers": sum(len(step) for _, step in steps),
            "counted": {name: after[name] - before[name] for name in after},
        }

    async def _step(self, rows: int) -> list[float]:
        step = self.dispatcher.begin_step()
        hidden, layers = torch.randn(rows, self.config.hidden_size), []
        for layer in self.config.moe_layers:
            started = time.perf_counter()
            await self.dispatcher.dispatch(step, layer, hidden)
            layers.append(time.perf_counter() - started)
        self.dispatcher.end_step(step)
        return layers


def network_of(name: str, address: str, config: ModelConfig) -> UcxNetwork:
    """Open a network as services do: shared memory inside a node, the network between nodes."""
    limits = FrameLimits.of_hidden_size(config.hidden_size)
    return UcxNetwork(name, "worker", SECRET, limits, own_address=address)


def counted() -> dict[str, float]:
    """Read the counters of this process."""
    found = {f"{link}_messages": metrics.MESSAGES.labels(link) for link in ("inter", "intra")}
    for way in WAYS:
        found[f"rounds {way}"] = metrics.ROUNDS.labels(way)
    return {name: float(counter._value.get()) for name, counter in found.items()}


async def work(role: str, name: str, node: str, address: str, model: Path, control: Path) -> None:
    """Do what is said on the control socket until it ends."""
    made = (AttentionWorker if role == "attention" else ExpertWorker)(name, node, address, model)
    listening = await made.open()
    reader, writer = await asyncio.open_unix_connection(str(control), limit=1 << 26)

    async def say(answer: dict[str, Any]) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()

    await say({"name": name, "role": role, "node": node, "address": listening})
    while line := await reader.readline():
        order = json.loads(line)
        verb = order.pop("do")
        if verb == "place":
            order["placement"] = msgspec.convert(order["placement"], Placement)
            near = order.pop("neighbours", None)
            order |= {} if near is None else {"neighbours": [Endpoint(*each) for each in near]}
        with torch.inference_mode():
            await say(await getattr(made, verb)(**order))
    # Nothing of it is worth closing.
    os._exit(0)


def main() -> None:
    """Import everything once, then fork: nodes, and on each of them its workers."""
    told = json.loads(sys.argv[1])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torch.set_num_threads(1)
    hosts = LinkedHosts.find(told["hosts"])
    for node, (role, count) in told["nodes"].items():
        if os.fork() == 0:
            die_with_parent()
            hosts.enter(node)
            for n in range(count):
                if os.fork() == 0:
                    die_with_parent()
                    address = hosts.addresses[node]
                    paths = Path(told["model"]), Path(told["control"])
                    asyncio.run(work(role, f"{node}-{n}", node, address, *paths))
            signal.pause()
    # Until the bench ends.
    sys.stdin.readline()


def die_with_parent() -> None:
    """Never outlive the process that has forked this one."""
    # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    main()
