"""Expert workers that are processes, over real links, and die in the middle of an exchange."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.dispatch.local import LocalDispatcher
from moesaic.dispatch.routed.dispatcher import RoutedDispatcher
from moesaic.dispatch.two_phase.dispatcher import TwoPhaseDispatcher
from moesaic.errors import ExpertUnavailable
from moesaic.messages.placement import Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.network import UcxNetwork
from tests.dispatch.conftest import CPU, FP32, TIMEOUT_S
from tests.waiting import until

EVERYTHING = list(range(8))


class Experts:
    """Two workers on one node, each with all experts."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.orders = directory / "placement"
        script = Path(__file__).with_name("far_expert.py")
        with (directory / "stderr").open("w") as stderr:
            self.factory = subprocess.Popen(
                [sys.executable, str(script), str(model), str(self.orders)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                bufsize=1,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.found = [self._start(f"expert-{n}") for n in range(2)]

    def _start(self, name: str) -> tuple[int, str]:
        assert self.factory.stdin
        self.factory.stdin.write(f"{name}\n")
        pid, address = self._line().split()
        return int(pid), address

    def _line(self) -> str:
        assert self.factory.stdout
        line = self.factory.stdout.readline()
        assert line, "an expert worker died"
        return line

    def place(self, placement: Placement) -> None:
        part = self.orders.with_suffix(".part")
        part.write_bytes(msgspec.msgpack.encode(placement))
        part.rename(self.orders)
        for _ in self.found:
            assert self._line() == "placed\n"

    def signal(self, idx: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.found[idx][0], number)

    def stop(self, idx: int) -> None:
        """Stop a worker, and wait until it stands."""
        pid = self.found[idx][0]
        os.kill(pid, signal.SIGSTOP)
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def close(self) -> None:
        for idx in range(2):
            self.signal(idx, signal.SIGKILL)
        self.factory.kill()
        self.factory.communicate()


@pytest.fixture
def experts(tmp_path: Path, tiny_model: Any) -> Iterator[Experts]:
    made = Experts(tmp_path, tiny_model.directory)
    yield made
    made.close()


@pytest.mark.parametrize("mode", ["reduce", "relay"])
async def test_a_relay_that_is_killed_in_an_exchange_costs_a_step_and_no_sum(
    experts: Experts, tiny_model: Any, mode: Any
) -> None:
    config, checkpoint = load_config(tiny_model.directory), Checkpoint(tiny_model.directory)
    placement = placement_of(
        [placed_worker(f"expert-{n}", at, node="x") for n, (_, at) in enumerate(experts.found)],
        [EVERYTHING, EVERYTHING],
        config.moe_layers,
        8,
        model_digest=config.digest,
    )
    await asyncio.to_thread(experts.place, placement)
    network = UcxNetwork(
        "attention-0", "attention", b"secret", FrameLimits.of_hidden_size(config.hidden_size)
    )
    routed = RoutedDispatcher(network, load_gates(checkpoint, config, FP32, CPU), TIMEOUT_S)
    routed.use(TwoPhaseDispatcher(network, "attention-0", "a", mode, TIMEOUT_S, routed.route_of))
    local = LocalDispatcher(checkpoint, config, FP32, CPU)
    try:
        routed.set_placement(placement)
        # One of them would be enough to begin.
        await until(lambda: (route := routed.route_of(1)) is not None and route.live == (0, 1))
        step, hidden = routed.begin_step(), torch.randn(5, config.hidden_size)
        expected = await local.dispatch(local.begin_step(), 0, hidden)
        for _ in range(2):  # each relays once
            got = await routed.dispatch(step, 0, hidden)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        await asyncio.to_thread(experts.stop, 0)
        asking = asyncio.ensure_future(routed.dispatch(step, 0, hidden))
        for _ in range(10):  # turns in which the frames leave
            await asyncio.sleep(0)
        assert not asking.done()

        experts.signal(0, signal.SIGKILL)

        with pytest.raises(ExpertUnavailable, match="expert-0"):
            await asking
        routed.end_step(step)
        again = routed.begin_step()
        got = await routed.dispatch(again, 0, hidden)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        routed.end_step(again)
    finally:
        await routed.close()
        await network.close()
