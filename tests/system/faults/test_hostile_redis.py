"""A real suite whose Redis holds nothing but hostile values for a while: no process ends, and answers are as before."""

import asyncio

import psutil
import pytest

from moesaic.cluster.redis.bus import Bus
from tests.redis_vandals import VANDALS, Vandal, all_changed, all_plain
from tests.suites import Suite
from tests.system.asking import complete
from tests.waiting import eventually

# The vandal is patient. The suite's processes are as always.
pytestmark = pytest.mark.usefixtures("patient_with_redis")

# The two that leave the most to put right; tests of the scheduler have all.
COMMITTED = (all_plain, all_changed)


@pytest.mark.parametrize(
    "vandal",
    [pytest.param(each, marks=() if each in COMMITTED else pytest.mark.slow) for each in VANDALS],
)
def test_no_value_in_redis_ends_a_process(disaggregated: Suite, vandal: Vandal) -> None:
    suite = disaggregated
    before = complete(suite, "The king said to his")
    pids = {process["name"]: process["pid"] for process in suite.state()["processes"]}

    async def vandalise() -> None:
        url = psutil.Process(pids["scheduler"]).environ()["MOESAIC_REDIS_URL"]
        async with Bus.connect(url, "default", credentials=suite.credentials) as bus:
            number = 0
            while await vandal(bus, number):
                number += 1
                if number % 8 == 0:
                    await asyncio.sleep(1.0)  # readers look once a second

    asyncio.run(vandalise())
    eventually(lambda: suite.client().get("/readyz").status_code == 200)
    after = complete(suite, "The king said to his")

    assert after == before
    running = {process["name"]: process["pid"] for process in suite.state()["processes"]}
    assert running == pids
