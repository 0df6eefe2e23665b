"""Clients who mean harm hold nobody up: the gateway's loop is never held for long, and no process dies of a grammar."""

import asyncio
import math
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.soak.hostile import (
    BODIES,
    FRAMING,
    GRAMMARS,
    flood_bodies,
    flood_grammars,
    flood_trailers,
)
from tests.waiting import HANG_S

HELD_S = 0.5  # ten times the 50 ms that a request may hold the loop; unbounded bodies held it for 2 to 7 s
_BUCKET = re.compile(r'moesaic_gateway_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)')


class OwnLag:
    """By how much short sleeps of this process are too long: it does nothing that holds its loop for longer than a
    busy machine does."""

    def __init__(self) -> None:
        self.most_s = 0.0

    async def watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.02
            await asyncio.sleep(0.02)
            self.most_s = max(self.most_s, loop.time() - due)


def waited_s(pid: int) -> Counter[str]:
    """How long each thread of a process has waited for a core so far."""
    waited: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        # Of a thread that ends meanwhile, or a kernel that does not count it.
        with suppress(FileNotFoundError, ProcessLookupError):
            waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return waited


async def counts(suite: Any) -> dict[float, float]:
    """Of loop lags, up to each bucket's bound."""
    processes = {p["name"]: p for p in suite.state()["processes"]}
    gateway = next(p for name, p in processes.items() if name.startswith("gateway"))
    async with httpx.AsyncClient(timeout=HANG_S) as client:
        text = (await client.get(f"http://{gateway['metrics_address']}/metrics")).text
    return {float(bound): float(count) for bound, count in _BUCKET.findall(text)}


async def test_no_flood_holds_the_loop_and_everyone_survives(local: Any) -> None:
    pids = {p["name"]: p["pid"] for p in local.state()["processes"]}
    before, own, waited = await counts(local), OwnLag(), waited_s(pids["gateway"])
    watching = asyncio.create_task(own.watch())

    bodies = await flood_bodies(local.url, within_s=HANG_S)
    framing = await flood_trailers(local.url, within_s=HANG_S)
    grammars = await flood_grammars(local.url, within_s=HANG_S)

    watching.cancel()
    after = await counts(local)
    held = {
        bound: after[math.inf] - after[bound] - before[math.inf] + before[bound] for bound in after
    }
    # Not of threads that have ended: what remains of two counters is never negative.
    own_s = own.most_s + (waited_s(pids["gateway"]) - waited).total()
    bound = min(bound for bound in held if bound >= HELD_S + own_s)
    assert held[bound] == 0, f"held longer than each of these: {held}; {own_s=}"
    statuses = re.findall(r": (\d+)'", str(dict(bodies)))
    assert len(statuses) == bodies.total() == len(BODIES)
    assert set(statuses) <= {"200", "400"}
    assert {name for name in FRAMING if framing[f"{name}: hung up on"]} == set(FRAMING), framing
    assert grammars.total() == len(GRAMMARS)
    assert all(name.endswith((": 200", ": 400")) for name in grammars), grammars
    assert grammars["a chain of rules: 400"] == grammars["lexemes: 400"] == 1
    assert pids == {p["name"]: p["pid"] for p in local.state()["processes"]}
    with local.client() as client:
        body = {"prompt": "a", "max_tokens": 2, "guided_regex": "[0-9]{2}"}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"].isdigit()
