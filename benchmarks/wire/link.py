"""One attention worker and two expert workers on three hosts, joined by links of a set rate."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.links import LinkedHosts, NoLinks, linked_hosts
from benchmarks.common.turns import ratios, spread
from benchmarks.two_phase.fleet import SHAPE, make_model

HOSTS = ("attention", "expert-0", "expert-1")
RATES, QUICK_RATES = (100, 1000, 0), (100,)  # Mbit/s; 0: none
ROWS = (1, 16, 128)
TURNS, QUICK_TURNS = 9, 3
STEPS = 4  # of a turn


def measured_links(quick: bool) -> dict[str, Any]:
    """Measure a layer's exchange in both forms, by turns; says so where there are no namespaces."""
    try:
        with linked_hosts(HOSTS) as hosts, tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory))
            return _measure(hosts, Path(directory), quick)
    except NoLinks as error:
        return {"left_out": f"needs network namespaces and tc, as root: {error}"}


def _measure(hosts: LinkedHosts, model: Path, quick: bool) -> dict[str, Any]:
    told = {"hosts": hosts.told(), "model": str(model)}
    workers = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.wire.workers", json.dumps(told)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    figures: dict[str, Any] = {
        "hidden_size": SHAPE["hidden_size"],
        "layers": SHAPE["num_hidden_layers"],
    }
    try:
        for rate in QUICK_RATES if quick else RATES:
            hosts.shape(rate)
            found: dict[str, Any] = {}
            for rows in ROWS:
                times: dict[str, list[float]] = {"own": [], "int8": []}
                for _ in range(QUICK_TURNS if quick else TURNS):
                    for wire, taken in times.items():
                        order = {"wire": wire, "rows": rows, "steps": STEPS}
                        taken.append(float(_told(workers, order)))
                found[f"{rows}_rows"] = _compared(times)
            figures[f"{rate}_mbit" if rate else "unlimited"] = found
    finally:
        if workers.stdin is not None:
            workers.stdin.close()
        workers.wait(30)
    return figures


def _told(workers: "subprocess.Popen[str]", order: dict[str, Any]) -> str:
    assert workers.stdin is not None
    assert workers.stdout is not None
    print(json.dumps(order), file=workers.stdin, flush=True)
    return workers.stdout.readline().strip()


def _compared(times: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {
        f"{wire}_ms": round(1e3 * statistics.median(taken), 3) for wire, taken in times.items()
    }
    return figures | {"ratio": spread(ratios(times["int8"], times["own"]))}
