"""An agent's cable is cut: its users are served there all the same, others do without it, and links come back."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moesaic.cli.checks.links import check_links
from moesaic.cli.machine.links.cables import CableNetwork, cut, heal
from moesaic.cli.machine.state import StateFile
from moesaic.cli.terminal.outcome import CommandError
from tests.suites import Suite, running
from tests.system.asking import TYPED
from tests.system.edge import inside
from tests.system.edge.conftest import TIGHT
from tests.system.edge.control import SETTINGS, edge_control
from tests.system.edge.users import SITES, TOKENS, RightAnswers, users_at
from tests.waiting import until

AWAY = "agent-0"  # holds few of the experts


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Three agents in networks of their own, which cables join."""
    try:
        check_links("", ())
    except CommandError as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("linked")
    with running(directory, *TIGHT, "--link", "500mbit", settings=SETTINGS) as suite:
        yield suite


def network_of(suite: Suite) -> CableNetwork:
    """Find the cables of a suite."""
    state = StateFile(suite.directory / "run").running()
    assert state is not None
    assert state.network is not None
    return state.network


class Insiders:
    """Users inside an agent's network, as their answers come."""

    def __init__(self, right: RightAnswers) -> None:
        self.answered = self.refused = 0
        self._right = right.generated

    def take(self, line: bytes) -> None:
        """Check one answer."""
        number, answer = json.loads(line)
        if isinstance(answer, str):
            assert answer in TYPED, answer
            self.refused += 1
            return
        assert tuple(answer) == self._right[number].tokens, f"prompt {number}: {answer}"
        self.answered += 1

    async def more(self, count: int) -> None:
        """Wait for ``count`` more answers."""
        wanted = self.answered + count
        await until(lambda: self.answered >= wanted)


@asynccontextmanager
async def insiders(suite: Suite, agent: str, right: RightAnswers) -> AsyncIterator[Insiders]:
    """Have an agent's users ask it from within its network for the length of the block."""
    network = network_of(suite)
    prompts = json.dumps([answer.prompt for answer in right.generated])
    secret = (suite.directory / "run/secret").read_text(encoding="utf-8").strip()
    process = await asyncio.create_subprocess_exec(
        *network.cable(agent).enter,
        *(sys.executable, str(Path(inside.__file__)), suite.admin_address(agent)),
        *(prompts, str(TOKENS)),
        env={**os.environ, "MOESAIC_SECRET": secret},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    seen, output = Insiders(right), process.stdout

    async def read() -> None:
        async for line in output:
            seen.take(line)

    async with asyncio.TaskGroup() as reading:
        reading.create_task(read())
        try:
            await seen.more(1)
            yield seen
        finally:
            process.stdin.close()
            await process.wait()


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
async def test_a_site_that_is_cut_off_serves_its_users_alone_and_links_come_back(
    linked: Suite, right_answers: RightAnswers, seconds: int
) -> None:
    pids = {name: linked.pid(name) for name in SITES}
    network = network_of(linked)
    async with edge_control(linked) as seen:
        before = await seen.complete()
        async with (
            users_at(linked.url, right_answers) as load,
            insiders(linked, AWAY, right_answers) as own,
        ):
            cut(network, AWAY)
            try:
                # Others notice it by the silence alone.
                await asyncio.sleep(seconds)
                await own.more(2)
                await load.round()
            finally:
                heal(network, AWAY)
            after = await seen.complete()
            assert after.slots == before.slots

            async def linked_anew() -> bool:
                links = {name: (await seen.profile(name)).links for name in SITES}
                return all(
                    {name, *(link.peer for link in links[name])} >= {*SITES} for name in SITES
                )

            await until(linked_anew)
            remote = (await seen.profile(AWAY)).remote

            async def asks_others() -> bool:
                return (await seen.profile(AWAY)).remote > remote

            await until(asks_others)
    assert {name: linked.pid(name) for name in SITES} == pids
