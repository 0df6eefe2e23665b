"""An expert worker's process leaves when nobody uses it any more."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import start_redis
from moesaic.cluster.registry import Fleet, watch_fleet
from moesaic.cluster.rpc.channels import channel
from moesaic.cluster.security.credentials import Credentials
from moesaic.messages.registry import WorkerRecord
from moesaic.models.configuration.config import load_config
from moesaic.transport.contract import Link
from moesaic.transport.frame import FrameLimits
from moesaic.transport.ucx.network import UcxNetwork
from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc

pytestmark = pytest.mark.suite

SECRET = "the cluster secret"
PROOF = Credentials(SECRET.encode())


class Expert:
    """A worker's process, and what the registry shows of it."""

    def __init__(self, process: asyncio.subprocess.Process, fleet: Fleet) -> None:
        self.process, self._fleet = process, fleet

    async def until(self, state: str) -> WorkerRecord:
        while True:
            seen, record = self._fleet.version, self._fleet.workers.get("expert-0")
            if record is not None and record.state == state:
                return record
            await self._fleet.changed(seen)

    async def log(self) -> dict[str, dict[str, Any]]:
        """What it logged, by event, after its end, which was an orderly one."""
        out, err = await self.process.communicate()
        assert (self.process.returncode, err) == (0, b"")
        return {entry["event"]: entry for entry in map(json.loads, out.splitlines())}


@asynccontextmanager
async def expert(model: Path, directory: Path, *flags: str) -> AsyncIterator[Expert]:
    redis, url = start_redis(directory)
    try:
        async with Bus.connect(url, "default", credentials=PROOF) as bus, watch_fleet(bus) as fleet:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "moesaic.services.expert", "--redis-url", url, *flags),
                *("--model", str(model), "--secret", SECRET, "--worker-id", "expert-0"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                yield Expert(process, fleet)
            finally:
                if process.returncode is None:
                    process.kill()
                await process.communicate()
    finally:
        redis.kill()
        redis.wait()


@asynccontextmanager
async def linked(model: Path, record: WorkerRecord) -> AsyncIterator[Link]:
    """A peer's link to it."""
    limits = FrameLimits.of_hidden_size(load_config(model).hidden_size)
    network = UcxNetwork("attention-0", "attention", SECRET.encode(), limits)
    try:
        yield await network.connect(record.data_address, record.worker_id, 60.0)
    finally:
        await network.close()


async def test_it_serves_until_its_peers_have_left(tiny_model: Any, tmp_path: Path) -> None:
    async with expert(tiny_model.directory, tmp_path, "--grace-s", "600") as worker:
        record = await worker.until("ready")
        async with linked(tiny_model.directory, record) as link:
            worker.process.send_signal(signal.SIGTERM)
            await worker.until("draining")
            async with linked(tiny_model.directory, record):
                pass  # it still takes peers, whom the placement may send to it
            assert link.alive
            assert worker.process.returncode is None

            link.discard("no longer placed")
            log = await worker.log()

    assert set(log["worker.draining"]["peers"]) == {"attention-0"}
    assert log["worker.draining"]["grace_s"] == 600
    assert "grace.over" not in log


async def test_peers_that_stay_do_not_keep_it_longer_than_its_grace_time(
    tiny_model: Any, tmp_path: Path
) -> None:
    async with (
        expert(tiny_model.directory, tmp_path, "--grace-s", "0.2") as worker,
        linked(tiny_model.directory, await worker.until("ready")),
    ):
        worker.process.send_signal(signal.SIGTERM)
        log = await worker.log()

    assert log["grace.over"]["peers"] == ["attention-0"]


async def test_a_drained_worker_stays_and_can_be_taken_back(
    tiny_model: Any, tmp_path: Path
) -> None:
    async with expert(tiny_model.directory, tmp_path, "--grace-s", "600") as worker:
        record = await worker.until("ready")
        async with channel(record.admin_address, "expert-0", PROOF) as connection:
            admin = admin_pb2_grpc.AdminServiceStub(connection)
            health = health_pb2_grpc.HealthStub(connection)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

            await admin.Drain(pb.DrainRequest())
            await worker.until("draining")
            info = await admin.GetInfo(pb.GetInfoRequest())
            assert info.state == pb.SERVICE_STATE_DRAINING
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING

            await admin.Undrain(pb.UndrainRequest())
            await worker.until("ready")
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        worker.process.send_signal(signal.SIGTERM)
        log = await worker.log()  # at once: nobody uses it

    assert log["worker.draining"]["peers"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_it_whoever_uses_it(
    tiny_model: Any, tmp_path: Path, number: signal.Signals
) -> None:
    async with (
        expert(tiny_model.directory, tmp_path, "--grace-s", "600") as worker,
        linked(tiny_model.directory, await worker.until("ready")),
    ):
        worker.process.send_signal(signal.SIGTERM)
        await worker.until("draining")
        worker.process.send_signal(number)

        assert await worker.process.wait() == 128 + number
