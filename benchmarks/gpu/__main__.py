"""``make gpu MINUTES=10``: run the benchmarks that fit, and write each result as it comes.

The session's own file says what ran, for how long, and how it ended. A benchmark that fails or takes too long costs its
own result alone.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu.arms import ARMS, ChosenArm, chosen, within_devices
from benchmarks.gpu.mps import sharing_the_device
from moesaic.cli.machine.facts import commit, kernel_digests, machine_facts

RESULTS = Path(__file__).parents[1] / "results" / "gpu"
STOP_S = 10.0


def session(
    minutes: Annotated[float, typer.Option(min=1, help="Minutes that there are.")] = 25.0,
    only: Annotated[str, typer.Option(help="Names of benchmarks, with commas; default: all.")] = "",
    to: Annotated[Path, typer.Option(help="Directory for the results.")] = RESULTS,
) -> None:
    """Run the benchmarks that need a CUDA device."""
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to do")
        return
    known = {arm.bench: arm for arm in ARMS}
    names = only.split(",") if only else list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"--only {unknown[0]}: give one of {', '.join(known)}")
    to.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    begin = to / f"{datetime.now(UTC):%Y-%m-%d}-{name}"
    ended = time.monotonic() + 60 * minutes
    possible, skipped = within_devices([known[name] for name in names], torch.cuda.device_count())
    _run(chosen(possible, 60 * minutes), begin, ended, minutes, skipped)


def _run(
    turns: Sequence[ChosenArm],
    begin: Path,
    ended_s: float,
    minutes: float,
    skipped: Mapping[str, str] = MappingProxyType({}),
) -> None:
    report: dict[str, Any] = {
        "name": "session",
        "commit": commit(),
        "machine": machine_facts(),
        "kernels": kernel_digests(),
        "minutes": minutes,
        "arms": {name: {"outcome": f"not run: {why}"} for name, why in skipped.items()},
    }
    for name, why in skipped.items():
        print(f"{name}: not run: {why}", flush=True)
    for turn in turns:
        left_s = ended_s - time.monotonic()
        outcome = _run_one(turn, Path(f"{begin}-{turn.arm.bench}.json"), turn.limit_s(left_s))
        report["arms"][turn.arm.bench] = outcome
        Path(f"{begin}-session.json").write_text(json.dumps(report, indent=2) + "\n")
        print(f"{turn.arm.bench}: {json.dumps(outcome)}", flush=True)


def _run_one(turn: ChosenArm, to: Path, limit_s: float) -> dict[str, Any]:
    """Run one benchmark; tell its outcome."""
    outcome: dict[str, Any] = {"quick": turn.quick, "estimate_s": turn.estimate_s}
    if limit_s < turn.estimate_s / 2:
        return outcome | {"outcome": "not run: no time was left"}
    command = [sys.executable, "-m", "moesaic.cli", "bench", turn.arm.bench, "--json", str(to)]
    began = time.monotonic()
    with sharing_the_device(turn.arm.shares_device) as found:
        process = subprocess.Popen(
            command + ["--quick"] * turn.quick, env=os.environ | found, stdout=sys.stderr
        )
        try:
            code = process.wait(limit_s)
            ending = "ended" if code == 0 else f"failed with exit status {code}"
        except subprocess.TimeoutExpired:
            # A benchmark stops what it has started.
            process.terminate()
            ending = f"stopped after {limit_s:.0f} s"
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    took = round(time.monotonic() - began, 1)
    return outcome | {"mps": bool(found), "took_s": took, "outcome": ending}


if __name__ == "__main__":
    typer.run(session)
