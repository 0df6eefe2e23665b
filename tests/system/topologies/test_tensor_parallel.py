"""An attention worker of several ranks serves as one of one rank, and is lost with any of them."""

import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.suites import DEMO, MOESAIC, Suite, running
from tests.system.streams import around_fault, check
from tests.system.topologies.test_families import answers, assert_same, flags_of_family, made
from tests.waiting import eventually


def followers(suite: Suite, name: str) -> list[int]:
    """Process ids of the ranks behind the first of an attention worker."""
    found = []
    with suppress(
        FileNotFoundError, ProcessLookupError
    ):  # a thread, or all of it, may end meanwhile
        for task in Path(f"/proc/{suite.pid(name)}/task").iterdir():
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("deepseek_v2", "local"),
        ("qwen3_moe", "disaggregated"),
        ("qwen3_moe", "local"),
        ("deepseek_v2", "disaggregated"),
    ],
)
def test_two_ranks_give_the_tokens_of_one(family: str, topology: str, tmp_path: Path) -> None:
    flags = (*flags_of_family(family, tmp_path / "model"), "--topology", topology)
    with running(made(tmp_path / "one"), *flags) as suite:
        reference = answers(suite)

    with running(made(tmp_path / "two"), *flags, "--tensor-parallel", "2") as suite:
        found = answers(suite)

    assert_same(found, reference)


@pytest.mark.slow
def test_ranks_that_are_started_one_by_one_serve_and_are_lost_together(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    secret = {"MOESAIC_SECRET": "of ranks that are started one by one"}
    flags = ("--tensor-parallel", "2", "--tensor-parallel-address", address, "--dtype", "float32")
    own = ("--model", str(DEMO), "--dispatch", "local", "--tensor-parallel-rank", "1")
    command = [str(MOESAIC), "serve", "attention", *own, *flags]
    log = (tmp_path / "rank.log").open("wb")
    with subprocess.Popen(command, env={**os.environ, **secret}, stdout=log, stderr=log) as rank:
        try:
            suite_flags = ("--topology", "local", *flags)
            with running(made(tmp_path / "suite"), *suite_flags, settings=secret) as suite:
                body = {"model": "demo", "prompt": "Hello", "max_tokens": 5}
                with suite.client() as client:
                    assert client.post("/v1/completions", json=body).status_code == 200
                rank.send_signal(signal.SIGSTOP)  # its machine is gone: nothing is closed

                lost = {"event": "rank.lost", "cause": "rank 1 is gone"}
                eventually(
                    lambda: any(lost.items() <= entry.items() for entry in suite.log("attention-0"))
                )
        finally:
            rank.kill()


async def test_streams_outlive_a_rank_of_their_worker(tmp_path: Path) -> None:
    with running(tmp_path, "--attention", "2", "--tensor-parallel", "2") as suite:
        suite.until_joined()
        [rank], [other] = followers(suite, "attention-0"), followers(suite, "attention-1")
        before, after = await around_fault(suite, lambda: os.kill(rank, signal.SIGKILL))

        assert check(before, after) == len(before)
        eventually(lambda: followers(suite, "attention-0") not in ([], [rank]))
        assert followers(suite, "attention-1") == [other]
        suite.until_ready()
