"""A suite under mixed traffic for half an hour, an expert worker killed now and then: nothing is lost, wrong or kept.

``make soak``; ``SOAK_MINUTES`` makes it shorter or longer. The report goes to ``benchmarks/results/soak.json``.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.machine.facts import commit, machine_facts
from tests.soak.questions import questions
from tests.soak.traffic import Book, Traffic
from tests.soak.watch import Sample, Watch, slope_per_hour
from tests.suites import ROOT, Suite, running
from tests.waiting import eventually

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
REPORT = ROOT / "benchmarks" / "results" / "soak.json"
CLIENTS = 8
SAMPLE_S = min(10.0, MINUTES * 60 / 30)
KILL_S = min(150.0, MINUTES * 60 / 3)
WARM_UP = 0.4  # share of the run after which memory must not grow
WARM_S = 60.0  # the same for a process that was started meanwhile
MIN_SAMPLES = 5  # fewer tell nothing of growth
KV_BLOCKS = 384  # few enough for requests to be put back now and then
# Memory may grow by so much, and by so much an hour, after warming up. The first is what an attention worker's memory
# goes up and down by as prompts of all lengths come and go; the second is 200 bytes a request.
GROWTH_MB, GROWTH_MB_PER_H = 15.0, 10.0
PARTS = 10  # of the run, for which the report tells the memory
SPARE_FILES, SPARE_TASKS = 8, 6  # more at the end than when idle at first: kept connections


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Suite]:
    monkeypatch.setenv("MOESAIC_KV_BLOCKS", str(KV_BLOCKS))
    with running(tmp_path) as suite:
        yield suite


@pytest.mark.slow
@pytest.mark.timeout(0)
async def test_nothing_is_lost_wrong_or_kept(suite: Suite) -> None:
    with suite.client() as client:
        asked = questions(client)
    watch = Watch(suite)
    idle_before, counted_before = watch.look(), watch.counted()
    traffic = Traffic(suite.url, asked, seed=0)
    running_on = asyncio.create_task(traffic.run(CLIENTS))

    kills = await _soak(suite, watch, traffic.book)

    traffic.stop()
    await running_on
    await asyncio.to_thread(suite.until_ready)
    await asyncio.to_thread(eventually, lambda: not _held(watch.look()))
    await asyncio.sleep(5)  # for what is closed late, such as connections of clients that left
    idle_after = watch.look()
    counted = {name: value - counted_before[name] for name, value in watch.counted().items()}
    faults = _faults(traffic.book, watch, idle_before, idle_after)
    faults += _miscounted(traffic.book, counted)
    _report(traffic.book, watch, idle_before, idle_after, kills, faults)
    assert not faults


async def _soak(suite: Suite, watch: Watch, book: Book) -> int:
    """Look and kill at their times until the run is over."""
    kills, started = 0, watch.now_s
    while watch.now_s - started < MINUTES * 60:
        await asyncio.sleep(SAMPLE_S)
        await asyncio.to_thread(watch.look)
        if watch.now_s - started > (kills + 0.5) * KILL_S:
            suite.signal(f"expert-{kills % 2}", signal.SIGKILL)
            kills += 1
        print(
            f"{watch.now_s / 60:.1f} min: {book.sent.total()} sent, {book.num_ended} ended, "
            f"{book.errors.total()} typed errors, {len(book.wrong)} wrong, {kills} kills",
            flush=True,
        )
    return kills


def _held(samples: list[Sample]) -> dict[str, float]:
    """List the counts that should be zero in an idle suite, and are not."""
    return {f"{s.name} {what}": value for s in samples for what, value in s.held.items() if value}


def _faults(
    book: Book, watch: Watch, idle_before: list[Sample], idle_after: list[Sample]
) -> list[str]:
    faults = [*book.wrong[:20]]
    if book.sent.total() != book.num_ended:
        faults.append(f"{book.sent.total()} were sent, {book.num_ended} ended")
    faults += [f"{what}: {value} held at the end" for what, value in _held(idle_after).items()]
    before = {sample.pid: sample for sample in idle_before}
    for after in idle_after:
        if first := before.get(after.pid):
            if after.num_files > first.num_files + SPARE_FILES:
                faults.append(f"{after.name}: files {first.num_files} to {after.num_files}")
            if after.num_tasks > first.num_tasks + SPARE_TASKS:
                faults.append(f"{after.name}: tasks {first.num_tasks} to {after.num_tasks}")
    for name, growth in _growth(watch).items():
        if growth["gained_mb"] > growth["bound_mb"]:
            faults.append(f"{name}: memory grew: {growth}")
    return faults


def _miscounted(book: Book, counted: dict[str, float]) -> list[str]:
    """List the counts in which the gateway's own books differ."""
    expected = {"requests": book.sent.total(), "truncations": 0}
    return [
        f"the gateway counted {counted[name]:.0f} {name}, not {value}"
        for name, value in expected.items()
        if counted[name] != value
    ]


def _growth(watch: Watch) -> dict[str, dict[str, float]]:
    """Memory of each process since it was warm; of one that was killed, of its longest life."""
    grown: dict[str, dict[str, float]] = {}
    for life in watch.lives(MINUTES * 60 * WARM_UP, MINUTES * 60, WARM_S):
        if len(life) < MIN_SAMPLES:
            continue
        hours = (life[-1].at_s - life[0].at_s) / 3600
        slope = slope_per_hour(life)
        if hours > grown.get(life[0].name, {"hours": 0.0})["hours"]:
            grown[life[0].name] = {
                "hours": round(hours, 3),
                "mb_per_hour": round(slope, 2),
                "gained_mb": round(slope * hours, 2),
                "bound_mb": round(GROWTH_MB + GROWTH_MB_PER_H * hours, 2),
                "resident_mb": round(life[-1].resident_mb, 1),
            }
    return grown


def _resident(watch: Watch) -> dict[str, list[float]]:
    """Memory of each process in MB at the end of each part of the run."""
    names = dict.fromkeys(sample.name for sample in watch.samples)
    ends = [MINUTES * 60 * (part + 1) / PARTS for part in range(PARTS)]
    return {
        name: [
            round([s.resident_mb for s in watch.samples if s.name == name and s.at_s <= end][-1], 1)
            for end in ends
        ]
        for name in names
    }


def _report(
    book: Book,
    watch: Watch,
    idle_before: list[Sample],
    idle_after: list[Sample],
    kills: int,
    faults: list[str],
) -> None:
    def idle(samples: list[Sample]) -> dict[str, Any]:
        return {
            s.name: {
                "resident_mb": round(s.resident_mb, 1),
                "files": s.num_files,
                "threads": s.num_threads,
                "tasks": s.num_tasks,
                **s.held,
            }
            for s in samples
        }

    figures = {
        "requests": book.sent.total(),
        "ended": book.num_ended,
        "right": dict(sorted(book.right.items())),
        "cancelled": book.cancelled,
        "typed_errors": dict(sorted(book.errors.items())),
        "wrong": len(book.wrong),
        "kills": kills,
        "memory": _growth(watch),
        "resident_mb": _resident(watch),
        "idle_before": idle(idle_before),
        "idle_after": idle(idle_after),
        "faults": faults,
    }
    config = {
        "minutes": MINUTES,
        "clients": CLIENTS,
        "kv_blocks": KV_BLOCKS,
        "kill_every_s": KILL_S,
    }
    result = {
        "name": "soak",
        "commit": commit(),
        "machine": machine_facts(),
        "config": config,
        "figures": figures,
        "paper": {},
        "notes": [f"memory counts from {WARM_UP:.0%} of the run on"],
    }
    REPORT.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps(figures, indent=1))
