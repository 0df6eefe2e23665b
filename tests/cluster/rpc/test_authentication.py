"""Who may call what: real servers, real calls, tokens and certificates."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from moesaic.cluster.own_addresses import own_addresses
from moesaic.cluster.rpc.channels import channel
from moesaic.cluster.rpc.server import AdminServer, admin_server
from moesaic.cluster.rpc.statuses import as_error
from moesaic.cluster.security.credentials import Credentials, own_credentials
from moesaic.cluster.security.scopes import METHODS, scope_of
from moesaic.cluster.security.tls import read_tls
from moesaic.errors import InvalidInput
from moesaic.settings import ModelSettings, ServiceSettings
from moesaic.telemetry.metrics import snapshot
from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import (
    admin_pb2_grpc,
    attention_pb2,
    attention_pb2_grpc,
    edge_agent_pb2,  # noqa: F401
    expert_pb2,  # noqa: F401  # its service is in the table
    gateway_pb2,  # noqa: F401
    ranks_pb2,  # noqa: F401
    scheduler_pb2,  # noqa: F401
)
from tests.certificates import certificate
from tests.system.strangers.messages import call_of

SECRET, NONE = Credentials(b"the secret"), Credentials()
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED


class Echo(attention_pb2_grpc.AttentionServiceServicer):
    """Answers each command of a stream."""

    async def Execute(self, requests, context):
        async for request in requests:
            yield attention_pb2.ExecuteResponse(request_id=request.cancel.request_id)


Echo.__abstractmethods__ = frozenset()


def register(server: grpc.aio.Server) -> None:
    attention_pb2_grpc.add_AttentionServiceServicer_to_server(Echo(), server)


@asynccontextmanager
async def serving(**settings: object) -> AsyncIterator[AdminServer]:
    settings = {"secret": "the secret", **settings}
    served = admin_server(
        ServiceSettings(**settings), "attention", worker_id="a-0", register=register
    )
    async with served as server:
        yield server


@pytest.fixture
async def server() -> AsyncIterator[AdminServer]:
    async with serving() as server:
        yield server


@pytest.mark.parametrize(
    "path", [b"\xf6moesaic.v1.AdminService/Shutdown", b"/\xff", b"/moesaic.v1.AdminService/\x80"]
)
async def test_a_path_that_is_no_text_ends_its_call_alone(server, path: bytes) -> None:
    host, _, port = server.address.rpartition(":")
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(call_of(path, bytes(5)))
        assert await reader.read(1)
        writer.close()

    async with channel(server.address, credentials=SECRET) as connection:
        info = await admin_pb2_grpc.AdminServiceStub(connection).GetInfo(pb.GetInfoRequest())
    assert info.worker_id == "a-0"


async def endless(*requests: Any) -> AsyncIterator[Any]:
    """A stream of requests that does not end.

    Who will be refused sends none: where gRPC sends just after a refusal, it tells of an internal error instead.
    """
    for request in requests:
        yield request
    await asyncio.Event().wait()


async def status_of(call) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def drained(address: str, credentials: Credentials, audience: str = "*") -> grpc.StatusCode:
    async with channel(address, audience, credentials) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        return await status_of(stub.Drain(pb.DrainRequest()))


def test_every_method_of_every_service_has_a_scope_and_there_are_no_others():
    pool = descriptor_pool.Default()
    served = set()
    for service in {method.split("/")[1] for method in METHODS}:
        for method in pool.FindServiceByName(service).methods:
            served.add(f"/{service}/{method.name}")
    protos = Path(__file__).parents[3] / "protos/moesaic/v1"
    ours = {
        f"moesaic.v1.{line.split()[1]}"
        for file in protos.glob("*.proto")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("service ")
    }

    assert served == set(METHODS)
    assert ours == {m.split("/")[1] for m in METHODS if m.startswith("/moesaic.v1.")}
    assert scope_of("/moesaic.v1.Tomorrow/Burn") == "admin"


async def test_what_changes_a_service_is_for_who_knows_the_secret(server):
    assert await drained(server.address, NONE) is UNAUTHENTICATED
    assert await drained(server.address, Credentials(b"another")) is UNAUTHENTICATED
    assert await drained(server.address, SECRET, "someone-else") is UNAUTHENTICATED
    assert server.status.state == "starting"

    assert await drained(server.address, SECRET, "a-0") is grpc.StatusCode.OK
    assert server.status.state == "draining"
    values = snapshot()
    assert values['moesaic_grpc_refused_total{status="unauthenticated"}'] >= 3


async def test_a_token_for_data_gives_no_orders(server):
    assert SECRET.tokens is not None
    proof = [("authorization", f"Bearer {SECRET.tokens.new('data')}")]
    async with channel(server.address, credentials=NONE) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        with pytest.raises(grpc.aio.AioRpcError, match="moesaic token --scope admin") as refused:
            await stub.Drain(pb.DrainRequest(), metadata=proof)
        info = await stub.GetInfo(pb.GetInfoRequest(), metadata=proof)

    assert refused.value.code() is PERMISSION_DENIED
    assert "permission_denied" in str(as_error(refused.value, "a-0"))
    assert info.worker_id == "a-0"


async def test_a_stream_is_refused_before_anything_of_it_is_read(server):
    async def first(credentials: Credentials, *sent: attention_pb2.ExecuteRequest) -> str:
        async with channel(server.address, credentials=credentials) as connection:
            stub = attention_pb2_grpc.AttentionServiceStub(connection)
            async for answer in stub.Execute(endless(*sent)):
                return str(answer.request_id)
        return ""

    cancel = attention_pb2.ExecuteRequest(cancel=attention_pb2.Cancel(request_id="r"))
    assert await first(SECRET, cancel) == "r"
    with pytest.raises(grpc.aio.AioRpcError, match=r"no token: .*MOESAIC_SECRET") as refused:
        await first(NONE)
    assert refused.value.code() is UNAUTHENTICATED


async def test_health_is_open_and_what_tells_how_a_service_is_built_is_not(server):
    async def codes(credentials: Credentials) -> list[grpc.StatusCode]:
        async with channel(server.address, credentials=credentials) as connection:
            health = health_pb2_grpc.HealthStub(connection)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            channelz = channelz_pb2_grpc.ChannelzStub(connection)
            reflection = reflection_pb2_grpc.ServerReflectionStub(connection)
            listed = reflection_pb2.ServerReflectionRequest(list_services="")
            asked = endless(*[listed] if credentials is SECRET else [])
            return [
                await status_of(health.Check(health_pb2.HealthCheckRequest())),
                await status_of(watch.read()),
                await status_of(channelz.GetServers(channelz_pb2.GetServersRequest())),
                await status_of(reflection.ServerReflectionInfo(asked).read()),
            ]

    ok = grpc.StatusCode.OK
    assert await codes(NONE) == [ok, *[UNAUTHENTICATED] * 3]
    assert await codes(SECRET) == [ok] * 4


async def test_a_stranger_holds_no_call_open_by_sending_nothing(server, monkeypatch):
    monkeypatch.setattr("moesaic.cluster.rpc.authentication._READ_S", 0.05)

    async def nothing():
        await asyncio.Event().wait()
        yield b""

    async with channel(server.address, credentials=NONE) as connection:
        held = connection.stream_unary("/grpc.health.v1.Health/Check")
        calls = [status_of(held(nothing())) for _ in range(20)]
        codes = await asyncio.gather(*calls)
        # An honest call has all the time that a busy machine may need.
        monkeypatch.setattr("moesaic.cluster.rpc.authentication._READ_S", 60.0)
        health = health_pb2_grpc.HealthStub(connection)
        assert await health.Check(health_pb2.HealthCheckRequest())

    assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED] * 20


async def test_without_a_secret_there_is_nothing_to_prove():
    async with serving(secret="") as server:
        assert await drained(server.address, NONE) is grpc.StatusCode.OK


async def test_the_own_calls_of_a_service_prove_what_its_settings_say():
    before = own_credentials()
    async with serving() as server, channel(server.address) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        assert (await stub.GetInfo(pb.GetInfoRequest())).worker_id == "a-0"

    assert own_credentials() == before


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (ServiceSettings(host="0.0.0.0", advertise_host="h"), r"0\.0\.0\.0 \(--host\)"),
        (ServiceSettings(control_host="198.51.100.1"), r"198\.51\.100\.1 \(--control-host\)"),
        (ModelSettings(model="m", data_host="::", advertise_host="h"), r":: \(--data-host\)"),
    ],
)
async def test_nobody_listens_beyond_this_machine_without_a_secret(settings, named):
    with pytest.raises(InvalidInput, match=rf"MOESAIC_SECRET\): is required to listen on {named}"):
        async with own_addresses(settings):
            pass

    async with own_addresses(
        settings.model_copy(update={"secret": ServiceSettings(secret="s").secret})
    ):
        pass


# Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    for ca, leaf in (("ca", "service"), ("other-ca", "stranger")):
        certificate(directory, ca, of="DNS:cluster.internal")
        certificate(directory, leaf, of="DNS:cluster.internal", ca=ca)
    return directory


def tls_settings(directory: Path, name: str = "service", ca: str = "ca") -> dict[str, str]:
    return {
        "tls_cert": str(directory / f"{name}.pem"),
        "tls_key": (directory / f"{name}.key").read_text(),  # as a file among the secrets gives it
        "tls_ca": str(directory / f"{ca}.pem"),
        "tls_name": "cluster.internal",
    }


def tls_credentials(directory: Path, **which: str) -> Credentials:
    given = tls_settings(directory, **which)
    return Credentials(b"the secret", read_tls(*given.values()))


async def test_both_ends_show_a_certificate_of_the_authority(certificates):
    async with serving(**tls_settings(certificates)) as server:
        assert await drained(server.address, tls_credentials(certificates)) is grpc.StatusCode.OK
        for strangers in (
            SECRET,  # no certificate at all
            tls_credentials(certificates, name="stranger"),  # of another authority
            tls_credentials(certificates, ca="other-ca"),  # the server's is not of ours
        ):
            assert await drained(server.address, strangers) is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_proves_no_secret(certificates):
    async with serving(**tls_settings(certificates)) as server:
        shown = Credentials(b"another", tls_credentials(certificates).tls)
        assert await drained(server.address, shown) is UNAUTHENTICATED


async def test_the_health_probe_shows_the_certificate_of_the_service(certificates):
    async with serving(**tls_settings(certificates)) as server:
        server.status.set_state("ready")
        variables = {f"MOESAIC_{k.upper()}": v for k, v in tls_settings(certificates).items()}
        ran = [
            await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "moesaic.cluster.rpc.health_probe", server.address],
                env={k: v for k, v in os.environ.items() if "MOESAIC" not in k} | given,
                capture_output=True,
            )
            for given in (variables, {})
        ]

    assert [done.returncode for done in ran] == [0, 1]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tls_key": ""}, r"--tls-key \(MOESAIC_TLS_KEY\) is missing"),
        ({"tls_ca": "/nowhere.pem"}, r"--tls-ca \(MOESAIC_TLS_CA\) /nowhere.pem: cannot be read"),
        ({"tls_cert": __file__}, r"--tls-cert \(MOESAIC_TLS_CERT\) .* is not a PEM file"),
    ],
)
async def test_certificates_that_do_not_go_together_are_named(certificates, changed, why):
    with pytest.raises(InvalidInput, match=why):
        async with serving(**tls_settings(certificates) | changed):
            pass
