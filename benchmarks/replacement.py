"""Costs of moving experts for requests that are served meanwhile: gaps between tokens, with and without.

A suite of one attention worker and three expert workers generates for a few streams at a time. In
turns it is left alone, and made to move half of its experts to other workers and back.
"""

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.execute_stream import ExecuteStream, execute_stream
from benchmarks.common.models import MIDDLE, write_model
from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.common.turns import spread
from moesaic.cluster.rpc.channels import channel
from moesaic.messages.placement import EMPTY_SLOT
from moesaic.v1 import placement_pb2, scheduler_pb2_grpc
from moesaic.v1 import scheduler_pb2 as pb

STREAMS = 4
PROMPT = list(range(100, 164))
TOKENS = 128  # of each request; then comes the next
ROUNDS, QUICK_ROUNDS = 6, 2
SHARES = (0.1, 1.0)  # the default, and loading without rest
QUIET_S = 14.0  # before each move: until then workers keep what they held, and need not load it


@dataclass
class Gaps:
    """Gaps between tokens of one stream, in seconds, and the time at which each ended."""

    ended: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[float]:
        """Gaps within a span of time, if only in part."""
        return [
            gap
            for at, gap in zip(self.ended, self.seconds, strict=True)
            if at > start and at - gap < end
        ]


def run(quick: bool) -> dict[str, Any]:
    """Measure; see ``moesaic bench``."""
    with tempfile.TemporaryDirectory(prefix="moesaic-bench-model-") as name:
        model, slots = DEMO, 14
        if not quick:
            model, slots = Path(name), 7
            write_model(model, MIDDLE, "float32", tokenizer=DEMO)
        rounds = QUICK_ROUNDS if quick else ROUNDS
        shares = SHARES[:1] if quick else SHARES
        figures = {
            f"load_share_{share:g}": _measured(model, slots, share, rounds) for share in shares
        }
    notes = [
        "gaps between tokens as a client of the attention worker sees them: a step and its way",
        "left alone and moving take turns in one run; a move is all of prepare, commit and switch",
    ]
    if quick:
        notes.append("quick: the demo model, whose experts have 0.2 MB, and fewer rounds")
    return {
        "config": {
            "streams": STREAMS,
            "rounds": rounds,
            "model": "demo" if quick else MIDDLE,
            "expert_workers": 3,
            "slots_per_layer": slots,
        },
        "figures": figures,
        "notes": notes,
    }


def _measured(model: Path, slots: int, share: float, rounds: int) -> dict[str, Any]:
    flags = ("--model", str(model), "--experts", "3", "--slots-per-layer", str(slots))
    settings = {
        "MOESAIC_LOAD_SHARE": str(share),
        "MOESAIC_MIN_EPOCH_INTERVAL_S": "0",
        "MOESAIC_PLACEMENT_POLICY": "keep",  # nothing moves but what is moved here
        "MOESAIC_ENABLE_PREFIX_CACHING": "false",
    }
    with running_suite(*flags, **settings) as suite:
        measured = asyncio.run(_rounds(suite, rounds))
        loaded = [_loaded(suite, f"expert-{number}") for number in range(3)]
    totals = {name: sum(of_one[name] for of_one in loaded) for name in ("loaded", "pulled")}
    return {**measured, "experts_loaded": totals["loaded"], "from_peers": totals["pulled"]}


async def _rounds(suite: RunningSuite, rounds: int) -> dict[str, Any]:
    scheduler = str(suite.processes["scheduler"]["admin_address"])
    windows: list[tuple[float, float, float]] = []  # left alone, then moving, until
    seconds: list[float] = []
    moved = 0
    async with AsyncExitStack() as parts, channel(scheduler) as connection:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(connection)
        streams = [
            await parts.enter_async_context(execute_stream(suite.attention_address))
            for _ in range(STREAMS)
        ]
        gaps = [Gaps() for _ in range(STREAMS)]
        done = asyncio.Event()
        asking = [
            asyncio.create_task(_generate(*pair, done)) for pair in zip(streams, gaps, strict=True)
        ]
        try:
            # Compiled, cached, warm
            await asyncio.sleep(2.0)
            home = (await stub.GetPlacement(pb.GetPlacementRequest(), timeout=10)).placement
            away = _half_elsewhere(home)
            for number in range(rounds):
                start = time.perf_counter()
                await asyncio.sleep(QUIET_S)
                middle = time.perf_counter()
                wanted = away if number % 2 == 0 else home
                current = (await stub.GetPlacement(pb.GetPlacementRequest(), timeout=10)).placement
                await stub.ApplyPlacement(
                    pb.ApplyPlacementRequest(placement=wanted, base_epoch=current.epoch),
                    timeout=300,
                )
                # Attention workers hear of it and switch.
                await asyncio.sleep(0.2)
                end = time.perf_counter()
                seconds.append(end - middle)
                windows.append((start, middle, end))
                moved = _moves(current, wanted)
                failed = [task for task in asking if task.done()]
                if failed:
                    await failed[0]
            done.set()
            # Of a request, gaps are known at its end.
            await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
    quiet = [[gap for one in gaps for gap in one.between(a, b)] for a, b, _ in windows]
    moving = [[gap for one in gaps for gap in one.between(b, c)] for _, b, c in windows]
    return _figures(quiet, moving, seconds, moved)


async def _generate(stream: ExecuteStream, gaps: Gaps, done: asyncio.Event) -> None:
    while not done.is_set():
        times = await stream.token_times(PROMPT, TOKENS, asyncio.Event())
        gaps.ended += times[1:]
        gaps.seconds += [b - a for a, b in itertools.pairwise(times)]


def _half_elsewhere(home: placement_pb2.Placement) -> placement_pb2.Placement:
    """Move every other layer's sets of experts one worker further."""
    away = placement_pb2.Placement()
    away.CopyFrom(home)
    for layer in away.layers[::2]:
        sets = [list(slots.expert_ids) for slots in layer.workers]
        for slots, experts in zip(layer.workers, sets[1:] + sets[:1], strict=True):
            slots.expert_ids[:] = experts
    return away


def _moves(before: placement_pb2.Placement, after: placement_pb2.Placement) -> int:
    return sum(
        len(set(now.expert_ids) - set(then.expert_ids) - {EMPTY_SLOT})
        for old, new in zip(before.layers, after.layers, strict=True)
        for then, now in zip(old.workers, new.workers, strict=True)
    )


def _figures(
    quiet: Sequence[Sequence[float]],
    moving: Sequence[Sequence[float]],
    seconds: Sequence[float],
    moved: int,
) -> dict[str, Any]:
    alone = [gap for of_round in quiet for gap in of_round]
    meanwhile = [gap for of_round in moving for gap in of_round]
    pairs = zip(quiet, moving, strict=True)
    of_rounds = [_ms(b, 0.99) / _ms(a, 0.99) for a, b in pairs if a and b]
    return {
        "gaps": {"quiet": len(alone), "moving": len(meanwhile)},
        "quiet_ms": {"p50": _ms(alone, 0.5), "p99": _ms(alone, 0.99)},
        "moving_ms": {"p50": _ms(meanwhile, 0.5), "p99": _ms(meanwhile, 0.99)},
        "p50_ratio": round(_ms(meanwhile, 0.5) / _ms(alone, 0.5), 3),
        "p99_ratio": round(_ms(meanwhile, 0.99) / _ms(alone, 0.99), 3),
        "p99_ratio_of_rounds": spread(of_rounds),
        "move_s": spread(seconds, 2),
        "experts_moved_each_time": moved,
    }


def _ms(gaps: Sequence[float], quantile: float) -> float:
    ordered = sorted(gaps)
    return round(ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] * 1e3, 3)


def _loaded(suite: RunningSuite, name: str) -> dict[str, int]:
    """Count, by its log, the experts that a worker has loaded since its first placement, and those from peers."""
    totals = {"loaded": 0, "pulled": 0}
    for line in (suite.directory / str(suite.processes[name]["log"])).read_text().splitlines():
        with suppress(json.JSONDecodeError):
            entry = json.loads(line)
            if entry.get("event") == "placement.prepared" and entry["kept"]:
                totals["loaded"] += entry["loaded"]
                totals["pulled"] += entry["pulled"]
    return totals
