"""Memory of the services of a suite that runs: what stays, and the most that was ever resident."""

import re
from pathlib import Path

import psutil

_SERVICE = re.compile(r"moesaic\.services\.(\w+)")


def peak_and_stay() -> dict[str, dict[str, int]]:
    """Read the memory of every process of our services on this machine, by its worker id, in MB.

    Shared pages count for each process in part (PSS), and at their peak in whole.
    """
    found: dict[str, dict[str, int]] = {}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        service = next((m for part in command if (m := _SERVICE.search(part))), None)
        if service is None or "--worker-id" not in command:
            continue
        name = command[command.index("--worker-id") + 1]
        at = Path(f"/proc/{process.pid}")
        found[name] = {
            "stays": _number(at / "smaps_rollup", "Pss") // 1024,
            "peak": _number(at / "status", "VmHWM") // 1024,
        }
    return found


def _number(file: Path, name: str) -> int:
    line = next(each for each in file.read_text().splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1])
