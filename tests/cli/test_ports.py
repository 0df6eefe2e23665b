"""Ports that are kept for servers that are still to come."""

import asyncio
import socket
from collections.abc import Iterator

import grpc
import httpx
import prometheus_client
import pytest

from moesaic.cli.clients.readiness import readiness
from moesaic.cli.machine.ports import check_port, hold_port, number_of
from moesaic.cli.terminal.outcome import CommandError
from moesaic.cluster.rpc.channels import SERVER_OPTIONS
from moesaic.telemetry.metrics import serve_metrics

HOST = "127.0.0.1"


@pytest.fixture
def held() -> Iterator[socket.socket]:
    with hold_port(HOST) as held:
        yield held


def test_a_held_port_is_given_to_nobody_who_asks_for_a_free_one(held: socket.socket) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, number_of(held)))
    with socket.socket() as other:  # nobody listens there either
        assert other.connect_ex((HOST, number_of(held))) != 0


def test_many_are_different() -> None:
    held = [hold_port(HOST) for _ in range(50)]

    assert len({number_of(one) for one in held}) == 50
    for one in held:
        one.close()


async def test_the_servers_of_services_listen_beside_it(held: socket.socket) -> None:
    port = number_of(held)
    for _ in range(2):  # again, as after a restart
        server = grpc.aio.server(options=SERVER_OPTIONS)
        assert server.add_insecure_port(f"{HOST}:{port}") == port
        await server.start()
        await server.stop(None)

    metrics, thread = prometheus_client.start_http_server(port, addr=HOST)
    metrics.shutdown()
    metrics.server_close()
    thread.join()

    listening = await asyncio.start_server(lambda reader, writer: None, HOST, port)
    with pytest.raises(CommandError, match=f"--port {port}: cannot listen on {HOST}:{port}"):
        check_port(HOST, port)
    listening.close()
    check_port(HOST, port)


async def test_what_answers_on_every_path_is_no_ready_gateway() -> None:
    address = serve_metrics(HOST, 0)  # it has a page for whatever is asked

    async with httpx.AsyncClient(base_url=f"http://{address}", verify=False) as client:
        assert await readiness(client) == ["what answers there is no gateway (status 200)"]
