"""Real services on nodes of different names: rows travel in two phases, and answers stay the same."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx

from moesaic.v1 import admin_pb2 as pb
from moesaic.v1 import admin_pb2_grpc
from tests.suites import DEMO, MOESAIC, Suite, log_entries
from tests.system.asking import question, stream
from tests.system.control import environment, events
from tests.waiting import HANG_S, until

TOKENS = 24
GATHERED = ("attention-a0", "attention-a1")  # on a node of their own


@contextmanager
def attention(suite: Suite, directory: Path) -> Iterator[list[Path]]:
    """Two more attention workers, not on the suite's node; gives their logs."""
    flags = ["--model", str(DEMO), "--node", "a", "--exchange", "relay"]
    processes, logs = [], [directory / f"{name}.log" for name in GATHERED]
    try:
        for name, path in zip(GATHERED, logs, strict=True):
            command = [str(MOESAIC), "serve", "attention", "--worker-id", name, *flags]
            with path.open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=log, cwd=directory, env=environment(suite)
                    )
                )
        yield logs
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(HANG_S)


@asynccontextmanager
async def drained(suite: Suite, name: str) -> AsyncIterator[None]:
    """One worker takes no requests for the length of the block."""
    async with suite.channel(name) as connection:
        stub = admin_pb2_grpc.AdminServiceStub(connection)
        await stub.Drain(pb.DrainRequest(), timeout=HANG_S)
        try:
            yield
        finally:
            await stub.Undrain(pb.UndrainRequest(), timeout=HANG_S)


def has_logged(log: Path, event: str) -> bool:
    return any(entry["event"] == event for entry in log_entries(log))


async def test_answers_are_the_same_and_a_killed_relay_costs_none(
    disaggregated: Suite, local: Suite, tmp_path: Path
) -> None:
    bodies = [question(number, TOKENS) for number in range(8)]

    async def answers(client: httpx.AsyncClient, *marks: asyncio.Event) -> list[str | None]:
        asked = zip(bodies, marks or [None] * len(bodies), strict=True)
        outcomes = await asyncio.gather(*(stream(client, body, None, mark) for body, mark in asked))
        assert [outcome.error for outcome in outcomes] == [None] * len(bodies)
        return [outcome.text for outcome in outcomes]

    with attention(disaggregated, tmp_path) as logs:
        async with httpx.AsyncClient(base_url=local.url, timeout=HANG_S) as client:
            expected = await answers(client)
        for event in ("worker.ready", "route.switched"):
            await until(lambda event=event: all(has_logged(log, event) for log in logs))  # type: ignore[misc]
        async with (
            drained(disaggregated, "attention-0"),
            httpx.AsyncClient(base_url=disaggregated.url, timeout=HANG_S) as client,
        ):
            assert await answers(client) == expected
            for name in ("expert-0", "expert-1"):  # each has relayed to the other
                await until(lambda name=name: events(disaggregated, name, "neighbour.linked"))  # type: ignore[misc]
            await until(lambda: any(has_logged(log, "neighbour.linked") for log in logs))

            marks = [asyncio.Event() for _ in bodies]
            asking = asyncio.create_task(answers(client, *marks))
            for mark in marks:
                await mark.wait()
            disaggregated.signal("expert-1", signal.SIGKILL)
            assert await asking == expected
