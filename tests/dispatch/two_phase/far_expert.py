"""Starts expert workers: forks one for each line "WORKER_ID" it reads, which prints "PID ADDRESS" and
answers lines of JSON, placements, that are written to the file "WORKER_ID" in the directory given."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import structlog
import torch

from moesaic.dispatch.two_phase.relay import ExpertRelay
from moesaic.experts.host import ExpertHost
from moesaic.messages.placement import Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.network import UcxNetwork


async def work(worker_id: str, model: Path, orders: Path) -> None:
    config = load_config(model)
    host = ExpertHost(
        Checkpoint(model),
        config,
        worker_id,
        config.moe.num_experts,
        torch.float32,
        torch.device("cpu"),
    )
    limits = FrameLimits.of_hidden_size(config.hidden_size)
    network = UcxNetwork(worker_id, "expert", b"secret", limits)
    relay = ExpertRelay(worker_id, network, host.answers.answer, host.epochs.placement)
    say(f"{os.getpid()} {await network.listen('127.0.0.1', 0, relay.answer)}")
    placement = await asyncio.to_thread(read, orders)
    host.loader.prepare(placement)
    host.epochs.commit(placement.epoch)
    say("placed")
    await asyncio.sleep(3600)


def read(orders: Path) -> Placement:
    while not orders.exists():
        time.sleep(0.01)
    return msgspec.msgpack.decode(orders.read_bytes(), type=Placement)


def say(line: str) -> None:
    """In one piece: others write there too."""
    os.write(1, f"{line}\n".encode())


def main(model: Path, orders: Path) -> None:
    """Fork workers until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    while line := sys.stdin.readline():
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the tests
            asyncio.run(work(line.strip(), model, orders))
            return


main(Path(sys.argv[1]), Path(sys.argv[2]))
