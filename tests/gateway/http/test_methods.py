"""Methods, statuses and headers by RFC 9110: HEAD, 405 with Allow, compressed bodies."""

import gzip
import itertools
import json
from typing import Any

from moesaic.services.gateway.app import ROUTERS
from tests.gateway.http.test_messages import ASKS, BODY, answers, exchange, plain

GET = sorted(
    route.path
    for module in ROUTERS
    for route in module.router.routes
    if "GET" in (getattr(route, "methods", None) or ())
)
POST = sorted(
    {
        route.path
        for module in ROUTERS
        for route in module.router.routes
        if "POST" in (getattr(route, "methods", None) or ())
    }
    - set(GET)
)
CHANGING = ("date", "x-request-id")


def test_there_are_routes_to_ask() -> None:
    assert {"/metrics", "/health", "/docs", "/openapi.json", "/v1/models"} <= set(GET)
    assert "/v1/chat/completions" in POST


async def asked(url: str, method: str, path: str, headers: str = "") -> tuple[int, Any, bytes]:
    sent = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
    head, _, body = (await exchange(url, sent.encode())).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    told = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]), {n: v for n, v in told.items() if n not in CHANGING}, body


async def test_head_has_the_headers_of_get_without_the_body(
    open_house: Any, tmp_path: Any, subtests: Any
) -> None:
    form = {"files": {"file": ("a.jsonl", b"{}\n" * 300_000)}, "data": {"purpose": "batch"}}
    async with open_house(files_dir=str(tmp_path)) as house:
        stored = (await house.client.post("/v1/files", **form)).json()["id"]
        for path in [*GET, "/nowhere", "/v1/models/no"]:
            path = path.replace("{file_id}", stored).replace("{model_id:path}", "tiny")
            with subtests.test(path=path):
                status, headers, body = await asked(house.url, "GET", path)
                head = await asked(house.url, "HEAD", path)

                assert int(headers["content-length"]) == len(body)
                if path == "/metrics":  # its numbers change
                    assert head[1].pop("content-length").isdecimal()
                    del headers["content-length"]
                assert head == (status, headers, b"")


async def test_a_connection_continues_after_a_head_request(open_house: Any) -> None:
    head = b"HEAD /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    async with open_house() as house:
        first, _, rest = (await exchange(house.url, head * 2 + last)).partition(b"\r\n\r\n")
        second, _, rest = rest.partition(b"\r\n\r\n")
        logged = [line["method"] for line in house.logs if line["event"] == "request.finished"]

    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 200")
    assert [json.loads(answer.body) for answer in answers(rest)] == [{"status": "ok"}]
    assert logged == ["HEAD", "HEAD", "GET"]


async def test_a_head_request_needs_the_key_that_get_needs(open_house: Any) -> None:
    async with open_house(api_key="k") as house:
        without = await asked(house.url, "HEAD", "/v1/models")
        with_key = await asked(house.url, "HEAD", "/v1/models", "authorization: Bearer k\r\n")

    assert (without[0], without[1]["www-authenticate"], without[2]) == (401, "Bearer", b"")
    assert with_key[0] == 200


async def test_other_methods_are_refused_with_those_of_the_route(
    open_house: Any, subtests: Any
) -> None:
    async with open_house() as house:
        for method, path in itertools.product(("HEAD", "GET", "PUT", "OPTIONS", "TRACE"), POST):
            with subtests.test(method=method, path=path):
                path = path.replace("{", "").replace("}", "")
                status, headers, body = await asked(house.url, method, path)

                assert (status, headers["allow"]) == (405, "POST")
                assert bool(body) == (method != "HEAD")
        refused = await house.client.post("/v1/models")
        files = await house.client.put("/v1/files/a")

    assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")
    assert files.headers["allow"] == "DELETE, GET, HEAD"


CODINGS = ["br", "zstd", "gzip, deflate", "gzip, gzip", "x"]


async def test_a_body_of_an_unknown_coding_is_refused_with_the_accepted_codings(
    open_house: Any, scripts: Any, subtests: Any
) -> None:
    form = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    async with open_house(scripts.says("yes")) as house:
        for coding, path in itertools.product(CODINGS, ("/v1/completions", "/tokenize")):
            with subtests.test(coding=coding, path=path):
                headers = {"content-type": "application/json", "content-encoding": coding}
                body = gzip.compress(BODY)
                answer = await house.client.post(path, content=body, headers=headers)

                assert answer.status_code == 415
                assert answer.headers["accept-encoding"] == "gzip, deflate"
                assert answer.json()["error"]["code"] == "unsupported_content_encoding"
        bare = await house.client.get("/v1/models", headers={"content-encoding": "gzip"})
        upload = await house.client.post("/v1/files", headers={"content-encoding": "br"}, **form)
        plainly, both = b"content-encoding: identity\r\n", b"content-encoding: br\r\n"
        head = ASKS + b"connection: close\r\n" + plainly
        [taken] = answers(await exchange(house.url, plain(head)))
        [refused] = answers(await exchange(house.url, plain(head + both)))

    assert [bare.status_code, upload.status_code] == [200, 415]
    assert [taken.status, refused.status] == [200, 415]
