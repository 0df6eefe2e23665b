"""Messages by RFC 9112 on a plain socket: invalid ones are refused with an answer, old clients are served."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from moesaic.services.gateway.files.upload import MAX_FORM_BYTES
from moesaic.services.gateway.http.protocol import DRAIN_BYTES, fault_of, split_target

BODY = b'{"prompt": "hello", "max_tokens": 4}'
JSON = b"content-type: application/json\r\n"
ASKS = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + JSON
OLD = ASKS.replace(b"1.1", b"1.0")
OK = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Answer(NamedTuple):
    """One answer, not decoded."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> Any:
        return json.loads(self.body)["error"]


async def exchange(url: str, *sent: bytes) -> bytes:
    """Send bytes, piece by piece, and read to the end of the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for piece in sent:
        writer.write(piece)
        await writer.drain()
    try:
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


def answers(raw: bytes) -> list[Answer]:
    """Split answers by their content lengths."""
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers["content-length"])
        found.append(Answer(int(first.split()[1]), headers, raw[:length]))
        raw = raw[length:]
    return found


@pytest.fixture
async def house(open_house: Any, scripts: Any) -> AsyncIterator[Any]:
    async with open_house(scripts.says("yes no")) as house:
        yield house


def coded(*values: bytes) -> bytes:
    """A request with these transfer codings, and a body in chunks."""
    lines = b"".join(b"transfer-encoding: %b\r\n" % value for value in values)
    return ASKS + lines + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


def plain(head: bytes, body: bytes = BODY) -> bytes:
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


REFUSED: dict[str, tuple[bytes, int]] = {
    "xchunked": (coded(b"xchunked"), 400),
    "chunkedx": (coded(b"chunkedx"), 400),
    "identity": (coded(b"identity"), 400),
    "gzip": (coded(b"gzip"), 400),
    "no coding": (coded(b""), 400),
    "gzip, chunked": (coded(b"gzip, chunked"), 501),
    "GZIP , Chunked": (coded(b"GZIP , Chunked"), 501),
    "chunked, identity": (coded(b"chunked, identity"), 400),
    "chunked, gzip": (coded(b"chunked, gzip"), 400),
    "chunked, chunked": (coded(b"chunked, chunked"), 400),
    "chunked twice": (coded(b"chunked", b"chunked"), 400),
    "two headers": (coded(b"gzip", b"chunked"), 501),
    "a parameter": (coded(b"chunked;q=1"), 400),
    "a quoted coding": (coded(b'"chunked"'), 400),
    "a tab": (coded(b"\x0bchunked"), 400),
    "both lengths": (
        ASKS + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "both, turned": (
        ASKS + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
        400,
    ),
    "two lengths": (ASKS + b"content-length: 36\r\n" + plain(b""), 400),
    "a list of lengths": (ASKS + b"content-length: 36, 36\r\n\r\n" + BODY, 400),
    "a signed length": (ASKS + b"content-length: +36\r\n\r\n" + BODY, 400),
    "a negative length": (ASKS + b"content-length: -1\r\n\r\n" + BODY, 400),
    "no length": (ASKS + b"content-length: \r\n\r\n" + BODY, 400),
    "a hexadecimal length": (ASKS + b"content-length: 0x24\r\n\r\n" + BODY, 400),
    "chunks of old": (
        b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "no chunk": (ASKS + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
    "a negative chunk": (ASKS + b"transfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n", 400),
    "a short chunk": (ASKS + b"transfer-encoding: chunked\r\n\r\n3\r\nhello\r\n0\r\n\r\n", 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "an empty host": (b"GET /v1/models HTTP/1.1\r\nhost: \r\n\r\n", 400),
    "a port alone": (b"GET /v1/models HTTP/1.1\r\nhost: :8000\r\n\r\n", 400),
    "two hosts": (OK[:-2] + b"host: localhost\r\n\r\n", 400),
    "a blank in a host": (b"GET / HTTP/1.1\r\nhost: local host\r\n\r\n", 400),
    "a slash in a host": (b"GET / HTTP/1.1\r\nhost: localhost/a\r\n\r\n", 400),
    "a user in a host": (b"GET / HTTP/1.1\r\nhost: a@localhost\r\n\r\n", 400),
    "two ports": (b"GET / HTTP/1.1\r\nhost: localhost:80:80\r\n\r\n", 400),
    "a port of letters": (b"GET / HTTP/1.1\r\nhost: localhost:http\r\n\r\n", 400),
    "two names": (b"GET / HTTP/1.1\r\nhost: localhost,localhost\x80\r\n\r\n", 400),
    "a host of bytes": (b"GET / HTTP/1.1\r\nhost: \xff\r\n\r\n", 400),
    "an open bracket": (b"GET / HTTP/1.1\r\nhost: [::1\r\n\r\n", 400),
    "an address without host": (b"GET http:///v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "an address of a user": (b"GET http://a@localhost/ HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "another scheme": (b"GET ftp://localhost/ HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "no path": (b"GET v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "a star": (b"GET * HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "a tunnel": (b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 501),
    "a tunnel to a path": (b"CONNECT /a HTTP/1.1\r\nhost: localhost\r\n\r\n", 501),
    "no target": (b"GET HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "no version": (b"GET /v1/models\r\n\r\n", 400),
    "another version": (b"GET /v1/models HTTP/3.7\r\nhost: localhost\r\n\r\n", 400),
    "a later version": (b"GET /v1/models HTTP/2.0\r\nhost: localhost\r\n\r\n", 505),
    "an older version": (b"GET /v1/models HTTP/0.9\r\nhost: localhost\r\n\r\n", 400),
    "HTTP/2 at once": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "no method": (b"/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "another method": (b"BREW /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "a header without a name": (OK[:-2] + b": a\r\n\r\n", 400),
    "a header without a colon": (OK[:-2] + b"nothing\r\n\r\n", 400),
    "a blank before a colon": (OK[:-2] + b"x-a : a\r\n\r\n", 400),
    "a header in two lines": (OK[:-2] + b"x-a: a\r\n b\r\n\r\n", 400),
    "a NUL": (OK[:-2] + b"x-a: \x00\r\n\r\n", 400),
    "a bare CR": (OK[:-2] + b"x-a: a\rb\r\n\r\n", 400),
}


async def test_a_message_that_is_wrong_gets_an_answer_and_ends_the_connection(
    house: Any, subtests: Any
) -> None:
    for name, (sent, status) in REFUSED.items():
        with subtests.test(name):
            [answer] = answers(await exchange(house.url, sent))

            assert answer.status == status
            assert answer.headers["connection"] == "close"
            assert "date" in answer.headers
            kind = "invalid_request_error" if status < 500 else "server_error"
            assert (answer.error["type"], bool(answer.error["message"])) == (kind, True)
    assert not house.workers[0].submits
    assert not [line for line in house.logs if line["log_level"] == "error"]


async def test_an_upload_that_breaks_its_chunks_is_refused_like_any_body(
    open_house: Any, tmp_path: Any
) -> None:
    form = b"content-type: multipart/form-data; boundary=a\r\ntransfer-encoding: chunked\r\n\r\n"
    part = b'--a\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    begun = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\n" + form
    async with open_house(files_dir=str(tmp_path)) as house:
        sent = begun + b"%x\r\n%b\r\n" % (len(part), part), b"zz\r\n"
        [answer] = answers(await exchange(house.url, *sent))
        files = (await house.client.get("/v1/files")).json()["data"]

    assert (answer.status, files) == (400, [])
    assert not [line for line in house.logs if line["log_level"] == "error"]


@pytest.mark.parametrize(
    "name", ["xchunked", "two hosts", "no chunk", "TLS", "a header in two lines"]
)
async def test_a_wrong_message_gets_its_answer_after_a_request_and_byte_by_byte(
    house: Any, name: str
) -> None:
    sent, status = REFUSED[name]
    told = answers(await exchange(house.url, plain(ASKS) + OK + sent))
    slowly = answers(await exchange(house.url, *(bytes([byte]) for byte in sent)))

    assert [answer.status for answer in told] == [200, 200, status]
    assert json.loads(told[0].body)["choices"][0]["text"] == "yes no"
    assert [answer.status for answer in slowly] == [status]


async def test_a_long_body_after_a_refused_head_does_not_cost_its_answer(house: Any) -> None:
    head = ASKS + b"transfer-encoding: xchunked\r\n\r\n"

    [answer] = answers(await exchange(house.url, head, *[b"a" * 60_000] * 10))

    assert answer.status == 400


LONG = [b"a" * (1 << 18)] * 48  # more than sockets hold
REFUSED_BEFORE = {
    "an old client": (b"POST /v1/completions HTTP/1.0\r\n" + JSON, b"", 413),
    "a last request": (ASKS + b"connection: close\r\n", b"", 413),
    "a compressed one": (ASKS + b"connection: close\r\n", b"content-encoding: br\r\n", 415),
    "an old compressed one": (b"POST / HTTP/1.0\r\n", b"content-encoding: br\r\n", 415),
    "no host": (b"POST /v1/completions HTTP/1.1\r\n", b"", 400),
}


@pytest.mark.parametrize("name", REFUSED_BEFORE)
@pytest.mark.parametrize("before", [b"", plain(ASKS)])
async def test_a_client_that_sends_all_of_a_refused_body_gets_its_answer(
    house: Any, name: str, before: bytes
) -> None:
    first, headers, status = REFUSED_BEFORE[name]
    length = b"content-length: %d\r\n\r\n" % sum(map(len, LONG))

    told = answers(await exchange(house.url, before + first + headers + length, *LONG))

    assert [answer.status for answer in told] == [200] * bool(before) + [status]


def test_a_refused_file_of_any_length_gets_its_answer() -> None:
    assert MAX_FORM_BYTES <= DRAIN_BYTES


@pytest.mark.parametrize("length", [40_000, 65_600, 200_000])
@pytest.mark.parametrize("before", [b"", OK])
async def test_a_target_that_is_too_long_is_refused_as_such(
    house: Any, length: int, before: bytes
) -> None:
    sent = before + OK.replace(b"models", b"models?" + b"a" * length)

    told = answers(await exchange(house.url, sent))

    assert [answer.status for answer in told] == [200] * bool(before) + [414]


@pytest.mark.parametrize("last", [OLD, ASKS + b"connection: close\r\n"])
async def test_bytes_after_the_last_request_are_read_and_not_answered(
    house: Any, last: bytes
) -> None:
    host, port = house.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(plain(last))
    while not reader.at_eof():
        [answer] = answers(await reader.read())
    for piece in (plain(ASKS), b"nothing", plain(ASKS)):
        writer.write(piece)
        await writer.drain()
    other = await house.client.get("/livez")  # the gateway has read them
    writer.close()
    await writer.wait_closed()

    assert (answer.status, other.status_code) == (200, 200)
    assert len(house.workers[0].submits) == 1


@pytest.mark.parametrize(
    "sent", [plain(OLD), plain(ASKS + b"connection: close\r\n"), plain(ASKS) * 3, plain(ASKS) + OK]
)
async def test_a_client_that_leaves_is_no_error(open_house: Any, scripts: Any, sent: bytes) -> None:
    async with open_house(scripts.silent) as house:
        host, port = house.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        await house.until(lambda: house.workers[0].submits)
        writer.close()
        await writer.wait_closed()
        await house.until(lambda: not house.gateway.num_inflight)
        await house.until(lambda: any(line["event"] == "request.finished" for line in house.logs))
        codes = [line.get("code") for line in house.logs if line["event"] == "request.finished"]

    assert codes == ["client_closed_request"]
    assert not [line for line in house.logs if line["log_level"] == "error"]


TARGETS = [
    (b"http://localhost/v1/models", b"other.example", 200),
    (b"HTTP://LOCALHOST:8000/v1/models?a=b", b"other.example", 200),
    (b"http://127.0.0.1/v1/models", b"localhost", 200),
    (b"http://other.example/v1/models", b"localhost", 403),
    (b"http://localhost", b"localhost", 404),
    (b"http://localhost?a=/v1/models", b"localhost", 404),
    (b"/v1/models?a=http://other.example/", b"localhost", 200),
    (b"//v1/models", b"localhost", 404),
]


async def test_an_absolute_target_names_the_host(house: Any, subtests: Any) -> None:
    for target, host, status in TARGETS:
        with subtests.test(target):
            head = b"GET %b HTTP/1.1\r\nhost: %b\r\nconnection: close\r\n\r\n" % (target, host)

            [answer] = answers(await exchange(house.url, head))

            assert answer.status == status


def test_targets_are_split_into_host_and_path() -> None:
    assert split_target(b"/a?b") == (None, b"/a?b")
    assert split_target(b"http://a:80/b?c#d") == (b"a:80", b"/b?c")
    assert split_target(b"https://[::1]?b") == (b"[::1]", b"/?b")


@pytest.mark.parametrize(
    "host",
    ["localhost", "a_b", "gateway.ns.svc:8000", "10.0.0.1:", "[::1]:80", "xn--bcher-kva"],
)
def test_hosts_have_the_form_of_addresses(host: str) -> None:
    assert fault_of(b"GET", b"/", "1.1", [(b"host", host.encode())]) is None


@pytest.mark.parametrize("coding", [b"chunked", b"CHUNKED", b"Chunked "])
async def test_chunked_may_be_written_in_any_case(house: Any, coding: bytes) -> None:
    sent = coded(coding).replace(b"\r\n", b"\r\nconnection: close\r\n", 1)

    [answer] = answers(await exchange(house.url, sent))

    assert answer.status == 200


STREAM = b'{"prompt": "hello", "max_tokens": 4, "stream": true}'


@pytest.mark.parametrize("kept", [b"", b"connection: keep-alive\r\n", b"connection: close\r\n"])
@pytest.mark.parametrize("host", [b"host: localhost\r\n", b""])
async def test_a_stream_to_an_old_client_is_a_plain_body(
    house: Any, kept: bytes, host: bytes
) -> None:
    old = OLD.replace(b"host: localhost\r\n", host + kept)

    head, _, body = (await exchange(house.url, plain(old, STREAM))).partition(b"\r\n\r\n")
    new = plain(ASKS + b"connection: close\r\n", STREAM)
    _, _, chunks = (await exchange(house.url, new)).partition(b"\r\n\r\n")

    lines = head.decode().lower().split("\r\n")
    assert "transfer-encoding: chunked" not in lines
    assert "connection: close" in lines
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])
    assert text == "yes no"
    assert chunks.endswith(b"0\r\n\r\n")


async def test_an_old_client_gets_the_length_of_an_answer_if_it_is_known(house: Any) -> None:
    expecting = OLD + b"expect: 100-continue\r\n"

    [whole] = answers(await exchange(house.url, plain(expecting)))
    [wrong] = answers(await exchange(house.url, plain(OLD, b"{}")))
    [probe] = answers(await exchange(house.url, b"GET /livez HTTP/1.0\r\n\r\n"))

    assert [answer.status for answer in (whole, wrong, probe)] == [200, 400, 200]
    assert {answer.headers["connection"] for answer in (whole, wrong, probe)} == {"close"}


async def test_a_client_that_expects_100_continue_gets_it(house: Any) -> None:
    raw = await exchange(house.url, plain(ASKS + b"connection: close\r\nexpect: 100-continue\r\n"))

    assert raw.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0, h2c"])
async def test_an_offer_of_another_protocol_is_ignored(house: Any, protocol: bytes) -> None:
    # Java's client sends such an offer with every request.
    offer = (
        b"connection: upgrade, http2-settings\r\nupgrade: %b\r\nhttp2-settings: AA\r\n" % protocol
    )
    get = OK[:-2] + offer + b"\r\n"
    last = coded(b"chunked").replace(
        b"\r\n", b"\r\nupgrade: h2c\r\nconnection: close, upgrade\r\n", 1
    )
    sent = plain(ASKS + offer) + get + last

    at_once = answers(await exchange(house.url, sent))
    slowly = answers(await exchange(house.url, *(bytes([byte]) for byte in sent)))
    halves = answers(await exchange(house.url, sent[:-40], sent[-40:]))

    for told in (at_once, slowly, halves):
        assert [answer.status for answer in told] == [200, 200, 200]
        for completion in (told[0], told[2]):
            assert json.loads(completion.body)["choices"][0]["text"] == "yes no"
