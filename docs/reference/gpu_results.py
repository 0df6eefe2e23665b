"""The page of results from GPUs: which kernels have changed since each of them."""

import json
from pathlib import Path
from typing import Any

from moesaic.cli.machine.facts import kernel_digests

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu"


def gpu_results_page(made: str, results: Path = RESULTS) -> str:
    """List the results, the newest last, and the kernels whose code is not the measured one any more."""
    lines = [
        "# Results from GPUs",
        "",
        made,
        "",
        "[`make gpu`](../operate/gpu.md#test-and-measure) writes these files. The last column names the modules of",
        "`libs/moesaic/kernels/triton` whose code has changed since. Comments do not count.",
        "A commit with `-dirty` was measured with changes that it lacks.",
        "",
        "| file | benchmark | device | commit | changed since |",
        "|---|---|---|---|---|",
    ]
    today = kernel_digests()
    for path in sorted(results.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        device, commit = result["machine"]["gpu"], _short(result["commit"])
        link = f"[{path.stem}](../../benchmarks/results/gpu/{path.name})"
        changed = _changed(result.get("kernels", {}), today)
        lines.append(f"| {link} | `{result['name']}` | {device} | `{commit}` | {changed} |")
    return "\n".join(lines) + "\n"


def _short(commit: str) -> str:
    name, _, rest = commit.partition("-")
    return f"{name[:12]}-{rest}" if rest else name[:12]


def _changed(measured: dict[str, Any], today: dict[str, str]) -> str:
    changed = sorted(name for name, digest in today.items() if measured.get(name) != digest)
    return ", ".join(f"`{name}`" for name in changed) or "none"
