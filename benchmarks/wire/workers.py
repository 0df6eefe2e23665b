"""The three workers that ``benchmarks.wire.link`` measures, each a process on its host.

They run the code of the services. The attention worker reads orders, one JSON object a line, and
answers each with the seconds of a layer.
"""

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path

import structlog
import torch
from torch import Tensor

from benchmarks.common import placements
from benchmarks.common.links import LinkedHosts
from benchmarks.common.placements import placed_worker
from benchmarks.two_phase.workers import CPU, FP32, TIMEOUT_S, die_with_parent, network_of
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import Placement
from moesaic.messages.wire import WireDtype
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.rings.plane import new_event_loop

PORT = 9701
FORMS: tuple[WireDtype, ...] = ("own", "int8")


def placement_of(model: Path, experts: list[tuple[str, str]]) -> Placement:
    """Every expert on one worker; ``experts`` are names and addresses of these."""
    config, count = load_config(model), len(experts)
    return placements.placement_of(
        [placed_worker(name, f"{address}:{PORT}", node=name) for name, address in experts],
        [list(range(n, config.moe.num_experts, count)) for n in range(count)],
        config.moe_layers,
        config.moe.num_experts,
        model_digest=config.digest,
    )


async def serve(name: str, address: str, model: Path, placement: Placement) -> None:
    """Answer until the parent ends."""
    config = load_config(model)
    host = ExpertHost(Checkpoint(model), config, name, config.moe.num_experts, FP32, CPU)
    host.loader.prepare(placement)
    host.epochs.commit(1)
    network = network_of(name, address, config)
    await network.listen(address, PORT, host.answers.answer)
    await asyncio.Event().wait()


async def ask(address: str, model: Path, placement: Placement) -> None:
    """Run steps as standard input orders."""
    config = load_config(model)
    gates, dispatchers = load_gates(Checkpoint(model), config, FP32, CPU), {}
    for wire in FORMS:
        network = network_of(f"attention-{wire}", address, config)
        dispatchers[wire] = RoutedDispatcher(network, gates, TIMEOUT_S, "static", wire=wire)
        dispatchers[wire].set_placement(placement)
        await dispatchers[wire].reachable()
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        random = torch.Generator().manual_seed(order["rows"])
        hidden = torch.randn(order["rows"], config.hidden_size, generator=random)
        taken_s = await _steps_s(
            dispatchers[order["wire"]], hidden, list(config.moe_layers), order["steps"]
        )
        print(taken_s, flush=True)


async def _steps_s(
    dispatcher: RoutedDispatcher, hidden: Tensor, layers: list[int], steps: int
) -> float:
    """Seconds of a layer, on average."""
    started = time.perf_counter()
    for _ in range(steps):
        step = dispatcher.begin_step()
        for layer in layers:
            await dispatcher.dispatch(step, layer, hidden)
        dispatcher.end_step(step)
    return (time.perf_counter() - started) / steps / len(layers)


def main() -> None:
    """Import everything once, then fork: the expert workers, and the one that asks here."""
    told = json.loads(sys.argv[1])
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    torch.set_num_threads(1)
    hosts, model = LinkedHosts.find(told["hosts"]), Path(told["model"])
    attention, *experts = hosts.addresses
    placement = placement_of(model, [(name, hosts.addresses[name]) for name in experts])
    for name in experts:
        if os.fork() == 0:
            die_with_parent()
            hosts.enter(name)
            work = serve(name, hosts.addresses[name], model, placement)
            with asyncio.Runner(loop_factory=new_event_loop) as runner, torch.inference_mode():
                runner.run(work)
    hosts.enter(attention)
    with asyncio.Runner(loop_factory=new_event_loop) as runner, torch.inference_mode():
        runner.run(ask(hosts.addresses[attention], model, placement))


if __name__ == "__main__":
    main()
