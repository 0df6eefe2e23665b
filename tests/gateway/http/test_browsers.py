"""A gateway without keys answers no page of another site in a user's browser, and every client that is no browser."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from moesaic.services.gateway.entry import BrowserGuard

LOOPBACK = [
    *("127.0.0.1", "127.0.0.1:8000", "127.8.9.1:1", "127.1", "0x7f.1:8", "2130706433:80"),
    *(
        "localhost",
        "LOCALHOST.:80",
        "[::1]",
        "[::1]:8000",
        "[0:0:0:0:0:0:0:1]:1",
        "[::ffff:127.0.0.1]:8000",
    ),
]
STRANGE = [
    *("evil.example", "evil.example:8000", "evil.example.", "[evil.example]"),
    *(
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.0.0.1@evil.example",
        "127.0.0.1:80@evil.example",
    ),
    *(
        "127.0.0.1 evil.example",
        "127.0.0.1,evil.example",
        "localhost:80:80",
        "[::1",
        "::1]:80",
        "",
        ":8000",
    ),
    *("0.0.0.0", "0", "[::]", "10.1.2.3:8000", "[fe80::1]:80"),
]
PAGES = [
    *(
        "https://evil.example",
        "http://127.0.0.1.evil.example:8000",
        "http://localhost@evil.example",
        "null",
    ),
    *(
        "file://",
        "http://10.1.2.3:8000",
        "chrome-extension://abcdef",
        "http://[",
        "evil.example",
        "",
        "127.0.0.1",
        "//127.0.0.1",
        "moz-extension://localhost",
    ),
]
OURS = ["http://localhost:3000", "http://127.0.0.1:8000", "https://[::1]:5173"]
FORM = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
ROUTES = [
    ("GET", "/livez"),
    ("GET", "/metrics"),
    ("HEAD", "/docs"),
    ("GET", "/v1/models"),
    ("GET", "/nowhere"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/files"),
    ("DELETE", "/v1/files/file-1"),
    ("OPTIONS", "/v1/files"),
    ("POST", "/v1/batches/batch_1/cancel"),
]


def code(method: str, headers: dict[str, str], host: str = "127.0.0.1", allowed: str = "") -> str:
    """The code that a request is refused with; empty: it is not."""
    refusal = BrowserGuard(host, allowed).refusal(method, Headers(headers))
    return "" if refusal is None else str(refusal.body.code)


@pytest.mark.parametrize("host", LOOPBACK)
def test_every_spelling_of_loopback_is_a_host_of_ours(host: str) -> None:
    assert code("POST", {"host": host}) == ""


@pytest.mark.parametrize("host", STRANGE)
def test_a_host_that_somebody_pointed_here_is_refused(host: str) -> None:
    assert code("GET", {"host": host}) == "host_not_allowed"


def test_beyond_loopback_names_are_those_that_were_configured() -> None:
    for host in (
        "10.1.2.3:8000",
        "[fe80::1]:80",
        "gateway.edge:8000",
        "ai.corp",
        "AI2.corp:80",
        "localhost",
    ):
        assert code("GET", {"host": host}, "gateway.edge", "ai.corp, ai2.corp") == ""
    for host in ("0.0.0.0:8000", "[::]:8000", "evil.example", "corp"):
        assert code("GET", {"host": host}, "0.0.0.0", "ai.corp,ai2.corp") == "host_not_allowed"
    assert code("POST", {"host": "ai.corp", "origin": "https://ai.corp"}, allowed="ai.corp") == ""


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_page_of_another_site_is_refused(method: str) -> None:
    for page in PAGES:
        assert code(method, {"host": "localhost", "origin": page}) == "origin_not_allowed", page
    for page in OURS:
        assert (
            code(method, {"host": "localhost", "origin": page, "sec-fetch-site": "cross-site"})
            == ""
        )


def test_a_page_without_an_origin_is_told_by_what_else_browsers_send() -> None:
    ours = {"host": "localhost:8000"}
    cross = {**ours, "sec-fetch-site": "cross-site"}

    assert code("POST", cross) == "origin_not_allowed"
    assert code("GET", {**cross, "sec-fetch-mode": "no-cors"}) == "origin_not_allowed"
    assert code("POST", {**cross, "sec-fetch-mode": "navigate"}) == "origin_not_allowed"
    assert code("GET", {**cross, "sec-fetch-mode": "navigate"}) == ""  # the user follows a link
    framed = {**cross, "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
    assert code("GET", framed) == "origin_not_allowed"
    assert code("POST", {**ours, "referer": "https://evil.example/a"}) == "origin_not_allowed"
    assert code("GET", {**ours, "referer": "https://evil.example/a"}) == ""
    assert (
        code(
            "POST",
            {**ours, "sec-fetch-site": "same-origin", "referer": "http://localhost:8000/docs"},
        )
        == ""
    )


@pytest.mark.parametrize("name", ["host", "origin", "referer"])
def test_a_header_that_is_there_twice_is_refused_whatever_it_says(name: str) -> None:
    ours = {"host": "localhost", "origin": "http://localhost", "referer": "http://localhost/a"}
    guard, raw = BrowserGuard("127.0.0.1", ""), Headers(ours).raw
    refusal = guard.refusal("POST", Headers(raw=[*raw, (name.encode(), ours[name].encode())]))

    assert guard.refusal("POST", Headers(raw=raw)) is None
    assert guard.refusal("GET", Headers(raw=[])) is None  # of a client of HTTP/1.0
    assert refusal is not None
    assert (refusal.status, f"{name} is there 2 times" in refusal.body.message) == (400, True)


@pytest.mark.parametrize("header", ["origin", "referer"])
def test_a_gateway_with_addresses_knows_the_pages_of_the_one_it_is_reached_by(header: str) -> None:
    def told(page: str, host: str) -> str:
        return code("POST", {"host": "10.1.2.3:8000", header: page}, host)

    for host in ("0.0.0.0", "::", "10.1.2.3", "gateway.edge"):
        assert told("http://10.1.2.3:8000/docs", host) == ""
        assert told("http://localhost:3000/", host) == ""
        assert told("http://203.0.113.5/", host) == "origin_not_allowed"
        assert told("http://[2001:db8::1]/", host) == "origin_not_allowed"
    assert told("http://gateway.edge/", "gateway.edge") == ""


@given(st.text(st.characters(max_codepoint=255), max_size=30))
def test_no_other_name_is_taken_for_loopback(tail: str) -> None:
    assert code("GET", {"host": f"localhost{tail}evil"}) == "host_not_allowed"
    assert code("GET", {"host": f"127.0.0.1{tail}evil"}) == "host_not_allowed"


async def test_a_page_reaches_no_route_without_keys(open_house, tmp_path, subtests) -> None:
    async with open_house(files_dir=str(tmp_path)) as house:
        for method, path in ROUTES:
            with subtests.test(method=method, path=path):
                sent: Any = FORM if path == "/v1/files" and method == "POST" else {}
                named = await house.client.request(
                    method, path, headers={"host": "evil.example"}, **sent
                )
                page = await house.client.request(method, path, headers={"origin": "null"}, **sent)

                assert (named.status_code, page.status_code) == (403, 403)
        listed = (await house.client.get("/v1/files")).json()["data"]

    assert listed == []


async def test_clients_that_are_no_browsers_go_on_as_before(open_house, scripts, tmp_path) -> None:
    async with open_house(scripts.says("yes"), files_dir=str(tmp_path)) as house:
        form = await house.client.post("/v1/files", **FORM)
        page = await house.client.post("/v1/files", headers={"origin": house.url}, **FORM)
        asked = await house.client.post("/v1/completions", json={"prompt": "hello"})

    assert [answer.status_code for answer in (form, page, asked)] == [200, 200, 200]


async def test_with_keys_names_and_pages_are_of_no_interest(open_house) -> None:
    headers = {"host": "evil.example", "origin": "https://evil.example"}
    async with open_house(api_key="k1") as house:
        without = await house.client.get("/v1/models", headers=headers)
        answer = await house.client.get(
            "/v1/models", headers={**headers, "authorization": "Bearer k1"}
        )

    assert (without.status_code, answer.status_code) == (401, 200)
