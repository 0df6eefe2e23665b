"""Runs tests many times beside busy processes: ``python -m tests.tiers.stress [--rounds 10] [TESTS]``.

A test that starts threads, sockets or processes has to pass each time.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.tiers.reached import ROOT

NUM_BUSY = 4
# Tests of what waits for others: they are the first to fail where a machine is slow.
CHOSEN = (
    "tests/attention/test_admin.py",
    "tests/attention/test_brownout.py",
    "tests/attention/test_modes.py",
    "tests/cluster",
    "tests/dispatch/routed",
    "tests/dispatch/two_phase",
    "tests/edge_agent",
    "tests/engine/test_brownout.py",
    "tests/engine/test_engine_trouble.py",
    "tests/engine/test_teller.py",
    "tests/expert",
    "tests/gateway/workers",
    "tests/scheduler/test_scheduler.py",
    "tests/transport",
)
SPIN = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\nwhile True: pass"  # ends with its parent


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep ``number`` processes computing."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(number)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> None:
    """Run the tests; the exit status says whether all rounds passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiers.stress")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--busy", type=int, default=NUM_BUSY)
    parser.add_argument("tests", nargs="*", default=list(CHOSEN))
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", *arguments.tests]
    passed = 0
    with busy_processes(arguments.busy):
        for number in range(1, arguments.rounds + 1):
            began_s = time.monotonic()
            ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            passed += ran.returncode == 0
            if ran.returncode:
                print(ran.stdout[-20_000:], ran.stderr[-2_000:])
            last = (ran.stdout.splitlines() or [""])[-1]
            print(f"round {number}: {last} ({time.monotonic() - began_s:.0f} s)", flush=True)
    print(f"{passed} of {arguments.rounds} rounds passed beside {arguments.busy} busy processes")
    sys.exit(passed != arguments.rounds)


if __name__ == "__main__":
    main()
