import asyncio
import os
import re
from pathlib import Path

import pytest

from moesaic.cli.clients.credentials import cluster_credentials
from moesaic.cli.clients.fleet import service_facts
from moesaic.cli.clients.scheduler import calling, scheduler_stub
from moesaic.cli.commands.token import token
from moesaic.cli.machine.state import StateFile, SuiteState, process_start_time
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.cluster.rpc.server import admin_server
from moesaic.cluster.security.tokens import TokenRefused, Tokens
from moesaic.settings import ServiceSettings
from moesaic.v1 import scheduler_pb2


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MOESAIC_SECRET", raising=False)
    monkeypatch.setenv("MOESAIC_SECRETS_DIR", str(tmp_path))


def start_suite(secret: str) -> None:
    state_file = StateFile()
    state_file.make_directory()
    state_file.write_secret(secret)
    state_file.write(
        SuiteState(
            pid=os.getpid(),
            start_time=process_start_time(os.getpid()) or 0,
            state="ready",
            url="http://127.0.0.1:8000",
            topology="local",
            model="m",
            processes=[],
        )
    )


def test_a_token_is_made_from_the_secret_of_the_suite_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_suite("of the suite")

    token(scope="data", audience="expert-0", seconds=60)

    printed = capsys.readouterr().out.strip()
    assert re.fullmatch(r"data:expert-0:\d{10}:[0-9a-f]{16}:[0-9a-f]{64}", printed)
    Tokens(b"of the suite").check(printed, "data", "expert-0")
    with pytest.raises(TokenRefused):
        Tokens(b"of the suite").check(printed, "admin", "expert-0")


def test_what_is_given_comes_before_the_suite_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_suite("of the suite")
    assert cluster_credentials().secret == b"of the suite"
    (tmp_path / "moesaic_secret").write_text("of a file\n")
    assert cluster_credentials().secret == b"of a file"
    monkeypatch.setenv("MOESAIC_SECRET", "of a variable")
    assert cluster_credentials().secret == b"of a variable"


def test_the_secret_of_a_suite_that_has_ended_is_not_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    StateFile().make_directory()
    StateFile().write_secret("left by a suite that was killed")

    with pytest.raises(
        CommandError, match=r"no secret to make a token from: .*MOESAIC_SECRET"
    ) as caught:
        token(scope="admin", audience="*", seconds=60)
    assert caught.value.status == Exit.UNHEALTHY


def test_certificates_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_TLS_CERT", "/nowhere.pem")

    with pytest.raises(CommandError, match=r"MOESAIC_TLS_CERT\) /nowhere.pem: cannot be read"):
        cluster_credentials()


async def test_who_has_another_secret_is_told_so_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOESAIC_SECRET", "another")

    async def ask(address: str) -> None:
        async with scheduler_stub(address) as stub:
            await stub.GetPlacement(scheduler_pb2.GetPlacementRequest())

    settings = ServiceSettings(secret="the secret")
    async with admin_server(settings, "scheduler", worker_id="scheduler") as server:
        with pytest.raises(CommandError, match=r"another secret: .*MOESAIC_SECRET") as caught:
            await asyncio.to_thread(calling, ask(server.address))
        shown = await service_facts("scheduler", "scheduler", server.address)

    assert caught.value.status == Exit.USAGE
    assert shown["state"] == "unreachable"
    assert "MOESAIC_SECRET" in shown["waiting_for"][0]


@pytest.mark.parametrize("audience", ["", "a:b", "expert 0", "é", "x" * 200])
def test_an_audience_that_no_service_can_be_is_refused(
    audience: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOESAIC_SECRET", "s")

    with pytest.raises(CommandError, match=r"--audience .*must be a worker id") as caught:
        token(scope="admin", audience=audience, seconds=60)

    assert caught.value.status == Exit.USAGE
    assert capsys.readouterr().out == ""
