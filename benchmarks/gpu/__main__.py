"""``make gpu MINUTES=10``: run the benchmarks that fit, and write each result as it comes.

The session's own file says what ran, for how long, and how it ended. A benchmark that fails or takes too long keeps
what it has measured, and costs no other one its result.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.gpu.arms import ARMS, IMPOSSIBLE, ChosenArm, chosen, within_devices
from benchmarks.gpu.leftovers import ending_leftovers
from benchmarks.gpu.mps import sharing_the_device
from moesaic.cli.machine.facts import commit, kernel_digests, machine_facts
from moesaic.cli.terminal.outcome import Exit

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
STOP_S = 10.0


def session(
    minutes: Annotated[float, typer.Option(min=1, help="Minutes that there are.")] = 25.0,
    only: Annotated[str, typer.Option(help="Names of benchmarks, with commas; default: all.")] = "",
    to: Annotated[Path, typer.Option(help="Directory for the results.")] = RESULTS,
) -> None:
    """Run the benchmarks that need a CUDA device."""
    ended = time.monotonic() + 60 * minutes
    known = {arm.bench: arm for arm in ARMS}
    names = only.split(",") if only else list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"--only {unknown[0]}: give one of {', '.join(known)}")
    if not torch.cuda.is_available():
        print(f"no CUDA device here, nothing is measured: {_cause()}", file=sys.stderr)
        raise typer.Exit(Exit.UNHEALTHY)
    # Benchmarks run in another directory.
    to = to.absolute()
    to.mkdir(parents=True, exist_ok=True)
    print(f"results: {to}", flush=True)
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    begin = to / f"{datetime.now(UTC):%Y-%m-%d}-{name}"
    possible, impossible = within_devices(
        [known[name] for name in names], torch.cuda.device_count()
    )
    for bench, why in impossible.items():
        print(f"{bench}: {why}", flush=True)
    arms = {name: {"outcome": impossible.get(name, "not run: it does not fit")} for name in names}
    if not _run(chosen(possible, 60 * minutes), begin, ended, minutes, arms):
        raise typer.Exit(Exit.ERROR)


def _cause() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no driver or no device"


def _run(
    turns: Sequence[ChosenArm], begin: Path, ended_s: float, minutes: float, arms: dict[str, Any]
) -> bool:
    """Run the arms, and write after each what there is to tell of all ``arms``.

    Returns:
        True if all that this machine can run have ended well.
    """
    report: dict[str, Any] = {
        "name": "session",
        "commit": commit(),
        "machine": machine_facts(),
        "kernels": kernel_digests(),
        "minutes": minutes,
        "arms": arms,
    }
    for turn, later in ((turn, turns[at:]) for at, turn in enumerate(turns, 1)):
        bench = turn.arm.bench
        to, later_s = Path(f"{begin}-{bench}.json"), sum(each.estimate_s for each in later)
        limit_s = turn.limit_s(ended_s - time.monotonic(), later_s)
        # Read if this process is killed.
        arms[bench] = {"outcome": f"was running, for {limit_s:.0f} s at most"}
        _write(Path(f"{begin}-session.json"), report)
        try:
            arms[bench] = _run_one(turn, to, limit_s)
        except OSError as error:
            arms[bench] = {"outcome": f"failed: {error}"}
        _write(Path(f"{begin}-session.json"), report)
        print(f"{bench}: {json.dumps(arms[bench])}", flush=True)
    return all(arm["outcome"].startswith(("ended", IMPOSSIBLE)) for arm in arms.values())


def _write(to: Path, report: dict[str, Any]) -> None:
    to.write_text(json.dumps(report, indent=2) + "\n")


def _run_one(turn: ChosenArm, to: Path, limit_s: float) -> dict[str, Any]:
    """Run one benchmark; tell its outcome."""
    outcome: dict[str, Any] = {"quick": turn.quick, "estimate_s": turn.estimate_s}
    if limit_s < turn.estimate_s / 2:
        return outcome | {"outcome": "not run: no time was left"}
    command = [sys.executable, "-m", "moesaic.cli", "bench", turn.arm.bench, "--json", str(to)]
    began = time.monotonic()
    with sharing_the_device(turn.arm.shares_device) as found, ending_leftovers():
        process = subprocess.Popen(
            command + ["--quick"] * turn.quick,
            cwd=ROOT,
            env=os.environ | found,
            stdout=sys.stderr,
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
                # Models in the host's memory that it did not come to remove.
                for left in Path("/dev/shm").glob("moesaic-bench-*"):
                    shutil.rmtree(left, ignore_errors=True)
    took = round(time.monotonic() - began, 1)
    return outcome | {"mps": bool(found), "took_s": took, "outcome": ending}


if __name__ == "__main__":
    typer.run(session)
