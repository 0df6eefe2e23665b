"""The C sources among hostile and hasty peers, watched by sanitizers: ``make fuzz`` does the same for long.

A round that fails says how it is played again.
"""

import os
import random
import subprocess
import time
from itertools import count
from pathlib import Path

import pytest

from moesaic.native.compile import VARIANTS, can_run, this_variant
from tests.native.sanitized import fuzz_driver, missing, threads_driver

SECONDS = float(os.environ.get("FUZZ_SECONDS", "300"))
RUNNABLE = [name for name in VARIANTS if can_run(name)]
ROUNDS = 200  # of each kind: a second or two
HASTE = (50_000, 2_000, 20_000)  # messages each way, batches, calls of the pool: the same

watched = pytest.mark.skipif(
    missing("address,undefined") is not None, reason=missing("address,undefined") or ""
)
raced = pytest.mark.skipif(missing("thread") is not None, reason=missing("thread") or "")


def played(driver: Path, *arguments: int) -> str:
    """Run a driver; return its last words, if it found nothing."""
    command = [str(driver), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout.strip()


@watched
def test_messages_of_hostile_peers_are_taken_or_refused_within_bounds() -> None:
    driver = fuzz_driver(this_variant())

    told = played(driver, 1, ROUNDS)

    assert told.endswith("passed, 0 failed")


@raced
def test_no_thread_misses_its_wake_up_or_races_another() -> None:
    driver = threads_driver(this_variant())

    told = played(driver, 1, *HASTE)

    assert told.endswith("passed, 0 failed")


@watched
@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_is_found_for_long() -> None:
    seed = first = random.SystemRandom().randrange(1 << 32)
    print(f"\nseeds from {first} on, for {SECONDS:.0f} s")
    drivers = [fuzz_driver(variant) for variant in RUNNABLE]
    threads = None if missing("thread") else threads_driver(this_variant())
    until = time.monotonic() + SECONDS
    for turn in count():
        driver, rounds = drivers[turn % len(drivers)], 5 * ROUNDS
        print(f"{driver.name} {seed} {rounds}: {played(driver, seed, rounds)}", flush=True)
        seed += rounds
        if threads and turn % 2:
            print(f"{threads.name} {seed}: {played(threads, seed, *HASTE)}", flush=True)
        if time.monotonic() >= until:
            return
