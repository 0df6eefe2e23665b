"""The console and its API before strangers: keys without the scope, other forms of paths, and too many streams."""

import asyncio
import resource
from typing import Any

import httpx
import pytest

from moesaic.cli.machine.ports import hold_port, number_of
from moesaic.services.gateway.app import make_app
from moesaic.services.gateway.main import console_server, http_server
from tests.gateway.conftest import House, OpenHouse
from tests.gateway.console.test_collecting import keys, show, states_of
from tests.waiting import HANG_S, until

PRIVATE = ("/v1/moesaic/state", "/v1/moesaic/experts", "/v1/moesaic/events")


def listener(house: House) -> Any:
    """Listen for the console alone."""
    app = make_app(house.gateway, shows_console=True)
    return http_server(house.gateway.settings, app, flags="console-")


@pytest.mark.parametrize("path", PRIVATE)
async def test_no_other_form_of_a_path_gets_round_its_scope(
    path: str, open_house: OpenHouse, tmp_path: Any
) -> None:
    file = keys(tmp_path, user=["infer"])
    paths = [
        *(
            path,
            f"/{path}",
            f"{path}/",
            f"{path}%0A",
            f"/console/..{path}",
            f"/console/%2e%2e{path}",
        ),
        *(path.replace("moesaic/", "moesaic%2F"), path.upper(), f"/console%2F..{path}"),
        *("/metrics", "/metrics%0A", "/v1/files%0A", "/console%0A"),
    ]
    async with open_house(api_keys_file=file, files_dir=str(tmp_path / "files")) as house:
        show(house)
        async with listener(house) as address, httpx.AsyncClient() as there:
            for form in paths:
                for method in ("GET", "HEAD", "OPTIONS", "POST"):
                    for url in (house.url, f"http://{address}"):
                        for headers in ({}, {"authorization": "Bearer user"}):
                            found = await there.request(method, f"{url}{form}", headers=headers)
                            assert found.status_code in (401, 403, 404), (method, form)


async def test_the_head_of_the_stream_ends_it(open_house: OpenHouse) -> None:
    async with open_house() as house:
        collector = show(house)
        head = await house.client.head("/v1/moesaic/events")
        await until(lambda: not collector.collects)
    assert (head.status_code, head.content) == (200, b"")


async def test_one_key_cannot_have_more_streams_than_pages_need(
    open_house: OpenHouse, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.services.gateway.console.collector.MOST_WATCHING", 2)
    file = keys(tmp_path, mine=["console"], other=["console"])
    async with open_house(api_keys_file=file) as house:
        show(house)
        async with listener(house) as address, httpx.AsyncClient(timeout=HANG_S) as there:

            def ask(key: str) -> Any:
                headers = {"authorization": f"Bearer {key}"}
                return there.stream("GET", f"http://{address}/v1/moesaic/events", headers=headers)

            async with ask("mine") as first, ask("mine") as second:
                assert await anext(states_of(first))
                assert await anext(states_of(second))
                async with ask("mine") as third:
                    assert third.status_code == 429
                    assert "retry-after" in third.headers
                async with ask("other") as others:
                    assert await anext(states_of(others))

            async def has_a_place() -> bool:
                async with ask("mine") as fourth:
                    return fourth.status_code == 200 and bool(await anext(states_of(fourth)))

            # The gateway hears a little later that it was left.
            await until(has_a_place)


@pytest.mark.parametrize("path", ["/v1/moesaic/state", "/v1/moesaic/experts"])
async def test_a_client_that_leaves_ends_the_collecting_for_it(
    path: str, open_house: OpenHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("moesaic.services.gateway.console.asking.Asking.ask", never)
    async with open_house() as house:
        collector = show(house)
        host, _, port = house.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        await until(lambda: collector.collects)
        writer.transport.abort()
        await until(lambda: not collector.collects)


async def test_streams_end_with_their_gateway_and_begin_no_more(open_house: OpenHouse) -> None:
    async with open_house() as house:
        collector = show(house)
        async with house.client.stream("GET", "/v1/moesaic/events") as response:
            lines = response.aiter_lines()
            await anext(lines)
            collector.end()
            last = [line async for line in lines if line][-1]
        refused = [await house.client.get(path) for path in PRIVATE]

    assert last == "data: [DONE]"
    assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [
        (503, "draining")
    ] * 3


async def test_a_crowd_at_the_console_leaves_files_for_rest(
    open_house: OpenHouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    held = hold_port("127.0.0.1")
    port = number_of(held)
    async with (
        open_house(console_port=port) as house,
        console_server(house.gateway, house.gateway.settings),
    ):
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        # 5 % of 40 files are two: the first ones had to go.
        gone = [await reader.read() for reader, _ in crowd[:2]]
        assert (await house.client.get("/livez")).status_code == 200
        for _, writer in crowd:
            writer.transport.abort()
    assert gone == [b"", b""]
