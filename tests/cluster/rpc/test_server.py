import asyncio
import json
import resource
from contextlib import suppress

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moesaic.cluster.rpc import channels
from moesaic.cluster.rpc.channels import channel
from moesaic.cluster.rpc.server import AdminServer, admin_server
from moesaic.cluster.rpc.statuses import as_error
from moesaic.errors import InvalidInput, NotReady
from moesaic.open_files import connections_within
from moesaic.settings import ServiceSettings
from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc, scheduler_pb2_grpc

SERVING, NOT_SERVING = 1, 2


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    pass


Scheduler.__abstractmethods__ = frozenset()


def register(server: grpc.aio.Server) -> None:
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(Scheduler(), server)


@pytest.fixture
async def admin():
    settings = ServiceSettings(secret="canary", redis_url="redis://u:canary@h/0", grace_s=7)
    async with admin_server(settings, "expert", worker_id="e-1", register=register) as server:
        yield server


@pytest.fixture
async def stub(admin: AdminServer):
    async with channel(admin.address) as connection:
        yield admin_pb2_grpc.AdminServiceStub(connection)


async def health(admin: AdminServer, service: str) -> int:
    async with channel(admin.address) as connection:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(connection).Check(request)
        return answer.status


async def test_info_shows_the_state_and_what_is_waited_for(admin, stub):
    admin.status.waiting_for.append("redis")
    admin.status.generation, admin.status.epoch = 3, 7

    info = await stub.GetInfo(pb.GetInfoRequest())

    assert (info.service, info.worker_id, info.generation, info.epoch) == ("expert", "e-1", 3, 7)
    assert info.state == pb.SERVICE_STATE_STARTING
    assert list(info.waiting_for) == ["redis"]


async def test_health_follows_the_state_for_every_service(admin, stub):
    names = ["", "moesaic.v1.AdminService", "moesaic.v1.SchedulerService"]
    assert [await health(admin, name) for name in names] == [NOT_SERVING] * 3

    admin.status.set_state("ready")
    assert [await health(admin, name) for name in names] == [SERVING] * 3

    await stub.Drain(pb.DrainRequest())
    assert [await health(admin, name) for name in names] == [NOT_SERVING] * 3
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
        await health(admin, "moesaic.v1.Nobody")


async def test_draining_runs_the_hooks_once_and_can_be_undone(admin, stub):
    calls = []

    async def hook(draining: bool) -> None:
        calls.append((draining, admin.status.state))

    admin.on_drain(hook)
    admin.status.set_state("ready")
    for call in (stub.Drain, stub.Drain):
        await call(pb.DrainRequest())
    for call in (stub.Undrain, stub.Undrain):
        await call(pb.UndrainRequest())

    assert calls == [(True, "draining"), (False, "ready")]


async def test_shutdown_asks_the_service_to_stop_with_the_given_grace(admin, stub):
    assert admin.grace_s == 7
    await stub.Shutdown(pb.ShutdownRequest(grace_s=1.5))

    assert admin.stop_requested.is_set()
    assert (admin.status.state, admin.grace_s) == ("draining", 1.5)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Undrain(pb.UndrainRequest())
    assert isinstance(as_error(refused.value, "e-1"), NotReady)


async def test_the_configuration_hides_secrets(stub):
    text = (await stub.GetConfig(pb.GetConfigRequest())).json

    assert json.loads(text)["grace_s"] == 7
    assert "canary" not in text


async def test_stats_and_stacks_can_be_read(stub):
    assert "moesaic_control_plane_up" in (await stub.GetStats(pb.GetStatsRequest())).values
    stacks = (await stub.DumpTasks(pb.DumpTasksRequest())).text
    assert "task health" in stacks
    assert "_follow" in stacks


async def test_a_bad_log_level_is_the_callers_mistake(stub):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.SetLogLevel(pb.SetLogLevelRequest(level="loud"))
    assert str(as_error(refused.value, "e-1")).startswith("level: must be one of debug")


async def test_reflection_and_channelz_know_the_services(admin):
    async with channel(admin.address) as connection:
        call = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        async for answer in call:
            names = {service.name for service in answer.list_services_response.service}
        servers = await channelz_pb2_grpc.ChannelzStub(connection).GetServers(
            channelz_pb2.GetServersRequest()
        )

    assert {"moesaic.v1.AdminService", "moesaic.v1.SchedulerService"} <= names
    assert "grpc.health.v1.Health" in names
    assert servers.server


async def test_a_taken_port_is_a_clear_error(admin):
    settings = ServiceSettings(admin_port=int(admin.address.rsplit(":", 1)[1]))

    with pytest.raises(InvalidInput, match=r"admin_port: .*in use.*--admin-port"):
        async with admin_server(settings, "expert", worker_id="e-2"):
            pass


async def test_an_idle_client_is_not_turned_away_for_its_pings(admin):
    options = [("grpc.keepalive_time_ms", 20), ("grpc.keepalive_permit_without_calls", 1)]
    async with grpc.aio.insecure_channel(admin.address, options=options) as connection:
        stub = health_pb2_grpc.HealthStub(connection)
        # Only time makes the client send pings; any number of them may be sent.
        for _ in range(3):
            await stub.Check(health_pb2.HealthCheckRequest())
            await asyncio.sleep(0.1)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5)  # with empty settings


async def test_connections_without_a_call_are_few_and_do_not_stay(monkeypatch):
    monkeypatch.setattr("moesaic.cluster.rpc.server._MAX_CONNECTIONS", 4)
    soon = ("grpc.max_connection_idle_ms", 100)
    options = [soon if option[0] == soon[0] else option for option in channels.SERVER_OPTIONS]
    monkeypatch.setattr("moesaic.cluster.rpc.server.SERVER_OPTIONS", options)
    assert soon in options
    async with admin_server(ServiceSettings(), "expert", worker_id="e-1") as server:
        host, _, port = server.address.rpartition(":")
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        for _, writer in strangers:
            writer.write(PREFACE)
        for reader, writer in strangers:
            with suppress(ConnectionError):
                await reader.read()  # to its end
            writer.transport.abort()

        assert await health(server, "") == NOT_SERVING


def test_strangers_get_a_share_of_the_files_that_may_be_open(monkeypatch):
    for soft, most in ((1024, 256), (20_000, 4096), (1, 1), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert connections_within(0.25, 4096) == most
