"""Runs a tier of tests in three processes, and tells what it took beside its budget.

``python -m tests.tiers.run TIER``; the Makefile has a target for each. Processes collect their own files only: files
are shared among them by what they cost. Many tests wait, so three keep two cores busy. Where suites start, pytest-xdist
hands the files out instead, to two processes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.tiers.chosen import PARTS, Costs, has_turn
from tests.tiers.reached import ROOT, changed_since, git, reached_by
from tests.tiers.tiers import ALWAYS, ON_CHANGE, TIERS, Tier

PROGRESS = re.compile(r"[.FEsxXuU,]+( *\[ *\d+%\])?$")
COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")
COVERAGE = ("-m", "coverage", "run")
FILE_S = 0.05  # what a file costs beside its tests
RECENT = "HEAD~10"  # a turn runs whole what has changed since


def part_of_this_commit() -> int:
    """The sixteenth of costly tests whose turn it is. It follows the commit, so that a commit has one result."""
    head = git("rev-parse", "HEAD")
    return int(head[0][:8], 16) % PARTS if head else 0


def balanced(
    files: Iterable[str], costs_s: dict[str, float], num_processes: int
) -> list[list[str]]:
    """Share ``files`` among processes, so that each has about the same cost.

    The files of a folder of ``tests`` import and start the same, so they stay together unless one process would have
    more than its share.
    """
    loads_s = {file: costs_s[file] + FILE_S for file in files}
    folders: dict[str, list[str]] = defaultdict(list)
    for file in loads_s:
        folders["/".join(file.split("/")[:-1][:2])].append(file)
    share_s = sum(loads_s.values()) / num_processes
    parts: list[list[str]] = []
    for folder in folders.values():
        together = sum(loads_s[file] for file in folder) <= share_s
        parts += [folder] if together else [[file] for file in folder]
    sums_s = [(sum(loads_s[file] for file in part), part) for part in parts]
    shares: list[list[str]] = [[] for _ in range(num_processes)]
    taken_s = [0.0] * num_processes
    for part_s, part in sorted(sums_s, reverse=True):
        least = taken_s.index(min(taken_s))
        shares[least] += part
        taken_s[least] += part_s
    return [sorted(share) for share in shares if share]


def files_of(tier: Tier, whole: Collection[str]) -> list[str]:
    """The files that a tier collects; the quick one and a turn take those of ``ON_CHANGE`` only if they run whole."""
    paths = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    files = sorted(path for path in paths if tier.takes(path))
    if tier.share in ("quick", "turn"):
        return [file for file in files if not file.startswith(ON_CHANGE) or file in whole]
    return files


def whole_in(tier: Tier, changed: list[str], reached: bool, part: int) -> set[str]:
    """The files that a tier runs whole.

    Args:
        tier: of ``ON_CHANGE``, all but the whole tiers take what the change reaches. A turn of suites has ``ALWAYS``.
        changed: paths of the change.
        reached: take all others that the change reaches, too.
        part: 0 to 15. A turn also takes what of ``ON_CHANGE`` has its turn, and tests that have changed themselves.
    """
    if tier.share == "all":
        return set()
    if tier.starts_suites:
        return set(ALWAYS)
    found = reached_by(changed)
    whole = found if reached else {file for file in found if file.startswith(ON_CHANGE)}
    if tier.share == "turn":
        files = files_of(TIERS["all"], ())
        whole |= {file for file in files if file in changed}
        whole |= {file for file in files if file.startswith(ON_CHANGE) and has_turn(file, part)}
    return whole


class Processes:
    """Processes of pytest that run beside each other. Their dots are shown at once, their reports at the end."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        """Start them."""
        self.counts: Counter[str] = Counter()
        self._reports: list[list[str]] = [[] for _ in commands]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self._started = [subprocess.Popen(command, cwd=ROOT, **pipes) for command in commands]  # type: ignore[call-overload]
        self._readers = [
            threading.Thread(target=self._read, args=each)
            for each in zip(self._started, self._reports, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def wait(self) -> int:
        """Wait for all of them, and print their reports.

        Returns:
            The worst status; a process that found no test at all is no failure beside others.
        """
        for reader in self._readers:
            reader.join()
        statuses = [process.wait() for process in self._started]
        for report in self._reports:
            sys.stdout.writelines(report)
            for number, kind in COUNTED.findall(report[-1] if report else ""):
                self.counts[kind.rstrip("s") if kind.startswith("error") else kind] += int(number)
        return max((0 if status == 5 else abs(status) for status in statuses), default=0)

    def _read(self, process: "subprocess.Popen[str]", report: list[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if PROGRESS.match(line.rstrip()):
                sys.stdout.write(line)
                sys.stdout.flush()
            else:
                report.append(line)


def commands_of(
    name: str,
    num_processes: int,
    part: int,
    whole: Collection[str],
    records: Path,
    covered: bool,
    only: Collection[str],
    more: Sequence[str],
) -> list[list[str]]:
    """The command of each process of a tier."""
    tier = TIERS[name]
    command = [sys.executable, *COVERAGE] if covered else [sys.executable]
    command += ["-m", "pytest", "-q", "-p", "tests.tiers.plugin", "-m", tier.marks]
    command += [f"--tier={name}", f"--tier-part={part}", f"--tier-whole={' '.join(sorted(whole))}"]
    command += [f"--tier-records={records}", *more]
    files = [file for file in files_of(tier, whole) if not only or file in only]
    if tier.starts_suites:
        shared = ["-n", str(num_processes), "--dist", "loadscope", "--no-loadscope-reorder"]
        return [[*command, *shared, "--max-worker-restart", "0", *files]]
    costs = Costs.read()
    costs_s = {f: costs.of_file(f, "all" if f in whole else tier.share) for f in files}
    return [
        [*command, "-p", "no:xdist", *share] for share in balanced(files, costs_s, num_processes)
    ]


def told(name: str, counts: Counter[str], records: list[dict[str, Any]], took_s: float) -> str:
    """The last lines of a run: its tests, its time, and the slowest of its tests."""
    tier = TIERS[name]
    waiting = sum(record.get("waiting", 0) for record in records)
    records = [record for record in records if "id" in record]
    cpu_s = sum(record["cpu_s"] for record in records)
    slowest = sorted(records, key=lambda record: -record["clock_s"])[:5]
    lines = [f"  {record['clock_s']:>7.1f} s  {record['id']}" for record in slowest]
    verdict = "within" if took_s <= tier.budget_s else "OVER"
    lines += [
        f"{tier.command}: {took_s:.0f} s, {verdict} its budget of {tier.budget_s} s on two idle cores; "
        f"{cpu_s:.0f} CPU-seconds in {len(records)} tests; {counts['deselected']} left to other tiers",
        f"{counts['passed']} passed, {counts['failed'] + counts['error']} failed, {counts['skipped']} skipped",
    ]
    if waiting:
        lines.append(
            f"ran {len(records)} of {len(records) + waiting}; the others cost much, and take turns by commit: "
            f"{tier.command.removesuffix('-turn')} runs all"
        )
    return "\n".join(lines)


def main() -> None:
    """Run a tier; the exit status is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.run")
    parser.add_argument("tier", choices=list(TIERS))
    parser.add_argument("--processes", type=int)
    parser.add_argument(
        "--changed", action="store_true", help="run files whole that a change reaches"
    )
    parser.add_argument("--coverage", action="store_true", help="tell the share of lines that run")
    parser.add_argument("--only", nargs="+", default=[], help="run these of the tier's files")
    parser.add_argument("--since", help="the change begins behind this commit")
    parser.add_argument("--part", type=int, choices=range(PARTS), default=part_of_this_commit())
    arguments, more = parser.parse_known_args()
    if arguments.tier == "nightly":
        seed = int.from_bytes(os.urandom(4))
        print(f"examples of properties: --hypothesis-profile=nightly --hypothesis-seed={seed}")
        more += ["--hypothesis-profile=nightly", f"--hypothesis-seed={seed}"]
    tier = TIERS[arguments.tier]
    since = arguments.since
    if tier.share == "turn" and git("rev-parse", "--verify", "-q", RECENT):
        since = since or RECENT
    whole = whole_in(tier, changed_since(since), arguments.changed, arguments.part)
    usual = 2 if tier.starts_suites else 3
    processes = arguments.processes or int(os.environ.get("PROCESSES") or usual)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        records = Path(os.environ.get("TEST_RECORDS") or Path(folder) / "records.jsonl")
        commands = commands_of(
            arguments.tier,
            processes,
            arguments.part,
            whole,
            records,
            arguments.coverage,
            arguments.only,
            more,
        )
        running = Processes(commands)
        status = running.wait()
        lines = records.read_text(encoding="utf-8").splitlines() if records.exists() else []
        took_s = time.monotonic() - began_s
        print(told(arguments.tier, running.counts, [json.loads(line) for line in lines], took_s))
    if arguments.coverage:
        for command in (["combine", "-q"], ["report", "--format=total"]):
            subprocess.run([sys.executable, "-m", "coverage", *command], cwd=ROOT, check=False)
    sys.exit(status)


if __name__ == "__main__":
    main()
