"""A tenant's traffic beside hostile clients: nothing is lost or wrong, and its answers take little longer.

``make soak``; ``HOSTILE_MINUTES`` makes it shorter or longer. The run alternates between calm and hostile turns, so
that a machine that gets slower meanwhile slows both. The report goes to ``benchmarks/results/soak-hostile.json``.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.machine.facts import commit, machine_facts
from tests.soak.questions import questions
from tests.soak.traffic import Traffic
from tests.suites import ROOT, Suite, running
from tests.waiting import eventually

MINUTES = float(os.environ.get("HOSTILE_MINUTES", "8"))
TURNS = 4  # calm and hostile ones, each so often
REPORT = ROOT / "benchmarks" / "results" / "soak-hostile.json"
CLIENTS = 2
REST_S = 5.0  # after a hostile turn: what it left has to end, and counts for neither
MEANT = {"p99_times_slower": 3.0}
# More is a fault: four runs of one day had 4.5 to 6.1, and 10.4 before causes were mended. The report says that what is
# meant was missed.
MOST_TIMES_SLOWER = 8.0
PRIORITIES = (
    -1,
    0,
    0,
    0,
)  # with one above 0 they would ask to wait until the hostile ones are done
ASKED = {"deadline_exceeded"}  # by those that leave too little time


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Suite]:
    keys = tmp_path / "keys.json"
    keys.write_text('{"tenants": []}')
    with running(tmp_path, "--api-keys-file", str(keys)) as suite:
        yield suite


@pytest.mark.slow
@pytest.mark.timeout(0)
async def test_hostile_clients_harm_nobody_else(suite: Suite) -> None:
    keys = {tenant: _new_key(suite, tenant) for tenant in ("honest", "hostile")}
    with suite.client() as client:
        client.headers["Authorization"] = f"Bearer {keys['honest']}"
        eventually(lambda: client.get("/version").status_code == 200)
        asked = questions(client)
    traffic = Traffic(suite.url, asked, seed=0, key=keys["honest"], priorities=PRIORITIES)
    asking = asyncio.create_task(traffic.run(CLIENTS))
    turn_s = MINUTES * 60 / (2 * TURNS)
    spans: dict[str, list[tuple[float, float]]] = {"calm": [], "hostile": []}
    attacks: dict[str, Counter[str]] = {}
    for turn in range(2 * TURNS):
        kind = "hostile" if turn % 2 else "calm"
        begun_s = time.monotonic()
        if kind == "hostile":
            for name, seen in (await _attack(suite, keys["hostile"], turn_s)).items():
                attacks.setdefault(name.partition(" ")[0], Counter()).update(seen)
        else:
            await asyncio.sleep(turn_s)
        spans[kind].append((begun_s, time.monotonic()))
        await asyncio.sleep(REST_S if kind == "hostile" else 0)
    traffic.stop()
    await asking
    await asyncio.to_thread(suite.until_ready)

    taken = {kind: _within(traffic.book.times, spans[kind]) for kind in spans}
    figures: dict[str, Any] = {
        kind: {
            "requests": len(seconds),
            "p50_s": round(statistics.median(seconds), 3),
            "p99_s": round(_p99(seconds), 3),
            "max_s": round(max(seconds), 3),
        }
        for kind, seconds in taken.items()
    }
    slower = _p99(taken["hostile"]) / _p99(taken["calm"])
    book = traffic.book
    faults = book.wrong[:20]
    faults += [f"typed error {code}: {n}" for code, n in book.errors.items() if code not in ASKED]
    if book.sent.total() != book.num_ended:
        faults.append(f"{book.sent.total()} were sent, {book.num_ended} ended")
    if slower > MOST_TIMES_SLOWER:
        faults.append(f"the 99th percentile is {slower:.2f} times as long beside hostile clients")
    times = round(slower, 2)
    missed = {"p99_times_slower": times} if times > MEANT["p99_times_slower"] else {}
    figures |= {"p99_times_slower": times, "targets": MEANT, "missed": missed}
    _report({**figures, "attacks": attacks, "faults": faults})
    assert not faults


def _new_key(suite: Suite, tenant: str) -> str:
    file = str(suite.directory / "keys.json")
    done = suite.cli("api-key", "new", "--tenant", tenant, "--file", file, "--json")
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["key"])


async def _attack(suite: Suite, key: str, seconds: float) -> dict[str, dict[str, int]]:
    """Let hostile clients, in a process of their own, do what they can; gives what each attack saw."""
    status = await asyncio.to_thread(suite.cli, "status", "--json")
    services = json.loads(status.stdout)["services"]
    data = [service["data_address"] for service in services if service.get("data_address")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.soak.attackers", suite.url, key, str(seconds), *data),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    seen: dict[str, dict[str, int]] = json.loads(output)
    return seen


def _within(times: list[tuple[float, float]], spans: list[tuple[float, float]]) -> list[float]:
    return [
        took_s
        for at_s, took_s in times
        if any(begun_s <= at_s <= ended_s for begun_s, ended_s in spans)
    ]


def _p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def _report(figures: dict[str, Any]) -> None:
    result = {
        "name": "soak-hostile",
        "commit": commit(),
        "machine": machine_facts(),
        "config": {"minutes": MINUTES, "clients": CLIENTS, "turns": TURNS},
        "figures": figures,
        "paper": {},
        "notes": [
            "the hostile clients run on the same two cores as the suite and the honest ones, and give way to them",
        ],
    }
    REPORT.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(figures, indent=1))
