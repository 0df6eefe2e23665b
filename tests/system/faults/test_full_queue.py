"""Workers die that were sent more than they had taken; their peers go on."""

import asyncio
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.suites import Suite, running
from tests.system.asking import ask
from tests.system.control import control
from tests.waiting import HANG_S, eventually, until

LONG = "The quick brown fox jumps over the lazy dog. " * 120


@pytest.fixture
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Three expert workers that hold every expert twice, and little shared memory to send through."""
    settings = {
        "MOESAIC_TRANSPORTS": "shm",  # of UCX; a ring belongs to two processes
        "UCX_POSIX_FIFO_SIZE": "16",
        "UCX_SYSV_FIFO_SIZE": "16",
    }
    flags = ("--experts", "3", "--slots-per-layer", "22")
    with running(tmp_path_factory.mktemp("narrow"), *flags, settings=settings) as suite:
        yield suite


@pytest.mark.slow
async def test_it_costs_no_request_and_changes_none(narrow: Suite) -> None:
    def renewals(name: str) -> int:
        return sum(line["event"] == "plane.renewed" for line in narrow.log(name))

    bodies = [
        {"model": "demo", "prompt": f"{n} {LONG}", "max_tokens": 2, "temperature": 0}
        for n in range(10)
    ]
    async with httpx.AsyncClient(base_url=narrow.url, timeout=HANG_S) as client:

        async def answers(salt: str) -> list[tuple[str, str | None]]:
            outcomes = await asyncio.gather(
                *(ask(client, {**body, "cache_salt": salt}) for body in bodies)
            )
            return [(outcome.text, outcome.error) for outcome in outcomes]

        async def is_computing() -> bool:
            return (
                await asyncio.to_thread(
                    narrow.metric, "attention-0", "moesaic_num_requests_running"
                )
                > 0
            )

        right = await answers("undisturbed")
        for kill in range(3):
            asking = asyncio.create_task(answers(f"kill {kill}"))  # nothing is computed already
            await until(is_computing)
            pid = narrow.pid("expert-1")
            narrow.signal("expert-1", signal.SIGSTOP)
            await asyncio.sleep(1.0)  # nothing shows that what can be sent to it has been
            narrow.signal("expert-1", signal.SIGKILL)

            assert await asking == right
            eventually(lambda gone=pid: narrow.pid("expert-1") not in (0, gone))
            await asyncio.to_thread(narrow.until_serving)
            async with control(narrow) as seen:
                await seen.agreed()  # it is placed again

    assert 1 <= renewals("attention-0") <= 3
    assert renewals("expert-0") + renewals("expert-2") == 0  # nobody else got stuck
