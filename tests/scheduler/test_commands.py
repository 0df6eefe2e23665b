"""What commands say about a placement, and how they end, against a real scheduler."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from moesaic.cli.clients.decisions import as_dict
from moesaic.cluster.placements import encode_placement
from moesaic.v1 import scheduler_pb2 as pb


async def run(address: str, *arguments: str) -> tuple[int, str, str]:
    """How a command ends, and what it writes."""
    command = [sys.executable, "-m", "moesaic.cli", *arguments, "--scheduler", address]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_pin_to_nobody_waits_and_is_said_by_who_shows_the_placement(suite: Any) -> None:
    scheduler = await suite.scheduler()
    address = (await scheduler.until("service.ready"))["admin_address"]
    async with suite.expert("a", slots=8):
        await suite.until_epoch(1)

        code, _, said = await run(address, "experts", "pin", "3", "nobody", "--layer", "1")
        assert (code, "no expert worker nobody is here now (a)" in said) == (0, True)

        wait = "worker nobody is not placed, and expert 3 is pinned to it"
        while True:
            code, shown, _ = await run(address, "placement", "show", "--json")
            assert code == 0
            if json.loads(shown)["waiting_for"] == [wait]:
                break
        assert f"waiting for: {wait}" in (await run(address, "placement", "show"))[1]


async def test_a_layer_without_experts_is_wrong_use(suite: Any) -> None:
    scheduler = await suite.scheduler()
    address = (await scheduler.until("service.ready"))["admin_address"]
    async with suite.expert("a", slots=8):
        await suite.until_epoch(1)

        code, _, said = await run(address, "experts", "ls", "--layer", "77")

    assert (code, "layers with experts are [1, 2]" in said) == (2, True)


async def test_a_plan_of_another_epoch_is_shown_and_said_to_be_out_of_date(
    suite: Any, tmp_path: Path
) -> None:
    scheduler = await suite.scheduler()
    address = (await scheduler.until("service.ready"))["admin_address"]
    async with suite.expert("a"), suite.expert("b"):
        first = await suite.until_epoch(1)
        swapped = replace(first, slots=[[[4, 1, 2, 3], [0, 5, 6, 7]], first.slots[1]])
        file = tmp_path / "plan.json"

        for base_epoch, out_of_date in ((1, False), (7, True)):
            plan = pb.Plan(placement=encode_placement(swapped), base_epoch=base_epoch)
            file.write_text(json.dumps(as_dict(plan)))
            code, shown, said = await run(address, "placement", "diff", str(file), "--json")
            assert code == 0
            assert [change["loads"] for change in json.loads(shown)] == [[4], [0]]
            assert ("would not be applied" in said) == out_of_date
