"""REST over TLS: the same answers, certificates that change while it serves, and files that cannot be used."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from moesaic.cluster.security.expiry import expiry_s
from moesaic.errors import InvalidInput
from moesaic.services.gateway.http.certificates import Certificates
from tests.certificates import certificate
from tests.waiting import HANG_S, until

EXPIRY = "moesaic_tls_certificate_expiry_timestamp_seconds"
NAMES = ("first", "second", "client", "stranger")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    for name in NAMES:
        certificate(directory, name)
    return directory


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> dict[str, str]:
    """Settings that name files with the first pair."""
    install(made, tmp_path, "first")
    return {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}


def install(made: Path, place: Path, name: str, key: str = "") -> None:
    shutil.copy(made / f"{name}.pem", place / "cert.pem")
    shutil.copy(made / f"{key or name}.key", place / "key.pem")


def trusting(made: Path, *names: str, shown: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context()
    for name in names:
        context.load_verify_locations(made / f"{name}.pem")
    if shown:
        context.load_cert_chain(made / f"{shown}.pem", made / f"{shown}.key")
    return context


async def ask(house: Any, context: ssl.SSLContext, **headers: str) -> httpx.Response:
    """Ask on a connection of its own."""
    url = house.url.replace("http://", "https://")
    async with httpx.AsyncClient(verify=context, timeout=HANG_S, trust_env=False) as client:
        body = {"prompt": "hello"}
        return await client.post(f"{url}/v1/completions", json=body, headers=headers)


async def test_answers_and_keys_are_the_same_over_tls(
    open_house: Any, scripts: Any, made: Path, pair: dict[str, str]
) -> None:
    async with open_house(scripts.says("yes"), api_key="k1", **pair) as house:
        context = trusting(made, "first")
        without = await ask(house, context)
        answer = await ask(house, context, authorization="Bearer k1")
        closing = await ask(house, context, authorization="Bearer k1", connection="close")
        with pytest.raises(httpx.ConnectError):
            await ask(house, trusting(made, "second"))
        with pytest.raises(httpx.RemoteProtocolError):
            await house.client.get("/livez")  # not encrypted

    assert [without.status_code, answer.status_code, closing.status_code] == [401, 200, 200]
    assert answer.json()["choices"][0]["text"] == "yes"


async def test_an_answer_of_http_1_0_ends_with_its_encrypted_connection(
    open_house: Any, scripts: Any, made: Path, pair: dict[str, str]
) -> None:
    body = b'{"prompt": "hello", "stream": true}'
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
    async with open_house(scripts.says("yes"), **pair) as house:
        host, _, port = house.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting(made, "first"))
        writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        answer = await reader.read()
        writer.close()

    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.rstrip().endswith(b"data: [DONE]")


async def test_what_is_no_http_gets_its_answer_over_tls(
    open_house: Any, made: Path, pair: dict[str, str]
) -> None:
    async with open_house(**pair) as house:
        host, _, port = house.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting(made, "first"))
        writer.write(b"no http\r\n\r\n")
        answer = await reader.readuntil(b"}")
        writer.transport.abort()

    assert answer.startswith(b"HTTP/1.1 400")


async def test_new_files_are_shown_to_new_connections_and_broken_ones_are_not(
    open_house: Any, scripts: Any, made: Path, pair: dict[str, str], tmp_path: Path
) -> None:
    def noted(event: str) -> int:
        return sum(entry["event"] == event for entry in house.logs)

    async with open_house(scripts.says("yes"), **pair) as house:
        assert (await ask(house, trusting(made, "first"))).status_code == 200

        install(made, tmp_path, "second", key="first")
        await until(lambda: noted("certificates.refused"))
        assert (await ask(house, trusting(made, "first"))).status_code == 200
        (tmp_path / "cert.pem").unlink()
        before = noted("certificates.refused")
        await until(lambda: noted("certificates.refused") > before)
        assert (await ask(house, trusting(made, "first"))).status_code == 200

        install(made, tmp_path, "second")
        await until(lambda: noted("certificates.loaded"))
        assert (await ask(house, trusting(made, "second"))).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await ask(house, trusting(made, "first"))


async def test_an_authority_that_is_taken_away_is_trusted_no_more(
    open_house: Any, scripts: Any, made: Path, pair: dict[str, str], tmp_path: Path
) -> None:
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes((made / "client.pem").read_bytes() + (made / "second.pem").read_bytes())
    asks = {"ssl_ca_certs": str(authorities), "ssl_cert_reqs": 2}
    async with open_house(scripts.says("yes"), **pair, **asks) as house:
        shown = trusting(made, "first", shown="client")
        assert (await ask(house, shown)).status_code == 200
        reused, session = await asyncio.to_thread(resume, house.url, shown, None)
        again, _ = await asyncio.to_thread(resume, house.url, shown, session)
        assert (reused, again) == (False, True)
        shutil.copy(made / "second.pem", authorities)
        await until(lambda: any(each["event"] == "certificates.loaded" for each in house.logs))
        with pytest.raises(httpx.TransportError):
            await ask(house, shown)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.to_thread(resume, house.url, shown, session)
        assert (await ask(house, trusting(made, "first", shown="second"))).status_code == 200


def resume(url: str, context: ssl.SSLContext, session: Any) -> tuple[bool, Any]:
    """Ask with the session of an earlier connection; tell whether it was taken, and the new session.

    Raises:
        ssl.SSLError, ConnectionError: the server refuses.
    """
    host, _, port = url.removeprefix("http://").partition(":")
    with (
        socket.create_connection((host, int(port)), HANG_S) as plain,
        context.wrap_socket(plain, server_hostname=host, session=session) as there,
    ):
        there.sendall(f"GET /livez HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        answer = b""
        while part := there.recv(1 << 16):
            answer += part
        if not answer:
            raise ConnectionError("no answer")
        assert answer.startswith(b"HTTP/1.1 200")
        return bool(there.session_reused), there.session


def test_the_expiry_is_shown_of_each_certificate_in_turn(
    made: Path, pair: dict[str, str], tmp_path: Path
) -> None:
    for name in ("first", "second"):
        install(made, tmp_path, name)
        Certificates(pair["ssl_certfile"], pair["ssl_keyfile"], "", 0)
        told = REGISTRY.get_sample_value(EXPIRY, {"certificate": "rest"})
        assert told == expiry_s((made / f"{name}.pem").read_bytes())


@pytest.mark.parametrize(("needs", "without"), [(1, True), (2, False)])
async def test_clients_show_certificates_as_the_setting_says(
    open_house: Any, scripts: Any, made: Path, pair: dict[str, str], needs: int, without: bool
) -> None:
    asks = {"ssl_ca_certs": str(made / "client.pem"), "ssl_cert_reqs": needs}
    async with open_house(scripts.says("yes"), **pair, **asks) as house:
        taken = await ask(house, trusting(made, "first", shown="client"))
        assert taken.status_code == 200
        with pytest.raises(httpx.TransportError):
            await ask(house, trusting(made, "first", shown="stranger"))
        if without:
            assert (await ask(house, trusting(made, "first"))).status_code == 200
        else:
            with pytest.raises(httpx.TransportError):
                await ask(house, trusting(made, "first"))


def test_files_that_cannot_be_used_are_named_at_start(made: Path, tmp_path: Path) -> None:
    cert, key = str(made / "first.pem"), str(made / "first.key")
    secret = tmp_path / "secret.key"
    command = ["openssl", "ec", "-aes128", "-passout", "pass:a", "-in", key, "-out", str(secret)]
    subprocess.run(command, check=True, capture_output=True)
    bad = {
        "--ssl-certfile": [
            ("", key, "", 0),
            ("", "", cert, 0),
            ("", "", "", 2),
            (str(tmp_path / "nowhere"), key, "", 0),
            (cert, str(made / "second.key"), "", 0),
            (cert, str(secret), "", 0),
            (cert, "", "", 0),
            (key, key, "", 0),
            ("a\0b", key, "", 0),
        ],
        "--ssl-keyfile": [(cert, str(tmp_path / "nowhere"), "", 0), (cert, str(tmp_path), "", 0)],
        "--ssl-ca-certs": [(cert, key, "", 1), (cert, key, "nowhere", 1), (cert, key, key, 2)],
    }
    for flag, cases in bad.items():
        for case in cases:
            with pytest.raises(InvalidInput) as refused:
                Certificates(*case)
            assert refused.value.field == flag, case


async def test_connections_that_never_shake_hands_are_bounded_and_let_others_in(
    open_house: Any,
    scripts: Any,
    made: Path,
    pair: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moesaic.services.gateway.http.protocol.connections_within", lambda *_: 3)
    async with open_house(scripts.says("yes"), **pair) as house:
        host, _, port = house.url.removeprefix("http://").partition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(6)]
        answer = await ask(house, trusting(made, "first"))
        # The first ones had to go.
        ended = [await reader.read() for reader, _ in silent[:3]]
        for _, writer in silent:
            writer.transport.abort()

    assert answer.status_code == 200
    assert ended == [b"", b"", b""]


async def test_a_handshake_that_takes_too_long_ends(
    open_house: Any, pair: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.services.gateway.http.handshake.HANDSHAKE_S", 0.05)
    async with open_house(**pair) as house:
        host, _, port = house.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
