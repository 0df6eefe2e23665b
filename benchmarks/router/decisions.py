"""Costs of a decision of the prefix router, and of naming a prompt's blocks; no processes, one core."""

import gc
import itertools
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from moesaic.prefix.blocks import BlockHasher
from moesaic.prefix.fleet import Job
from moesaic.prefix.flops import ModelFlops, gated_mlp, grouped_query
from moesaic.prefix.router import PrefixRouter, RouterLimits

PROMPT_TOKENS = 8192
BLOCK_SIZE = 16
NUM_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
FLEETS = (16, 1024)
KEPT = 40  # requests that are under way while the next one is decided
# The shape of Qwen3-30B-A3B: 48 layers, 8 experts of 768 to a token.
FLOPS = ModelFlops(
    [grouped_query(2048, 32, 4, 128)] * 48, 48 * 8 * gated_mlp(2048, 768), 2 * 2048 * 151936
)
LIMITS = RouterLimits(BLOCK_SIZE, max_blocks=1 << 40, max_queued=64, max_wait_s=1.0)


def measure(quick: bool) -> dict[str, Any]:
    """Measure medians in µs per fleet and case, tokens/s, and bytes for each block that is remembered."""
    decisions = 100 if quick else 1000
    rates = [_hash_rate() for _ in range(20 if quick else 100)]
    return {
        "decision_us": {f"{workers}_workers": _decisions(workers, decisions) for workers in FLEETS},
        "hash_tokens_per_s": {
            "p10": round(statistics.quantiles(rates, n=10)[0]),
            "p50": round(statistics.median(rates)),
        },
        "index_bytes_per_block": _index_bytes(),
    }


def _decisions(workers: int, count: int) -> dict[str, float]:
    """Time decisions for prompts that meet the index in different ways.

    They are cached not at all, by half, wholly at one worker or at all of them, or everywhere to another depth, where
    no two blocks have the same holders.
    """
    rng, everyone = random.Random(0), range(workers)
    cases: dict[str, tuple[int, Callable[[int], int]]] = {
        "nothing_cached": (0, lambda worker: 0),
        "half_cached_everywhere": (NUM_BLOCKS // 2, lambda worker: NUM_BLOCKS // 2),
        "cached_at_one": (NUM_BLOCKS, lambda worker: NUM_BLOCKS * (worker == workers // 2)),
        "cached_everywhere": (NUM_BLOCKS, lambda worker: NUM_BLOCKS),
        "cached_to_many_depths": (NUM_BLOCKS, lambda worker: rng.randint(1, NUM_BLOCKS)),
    }
    figures, everything = {}, []
    for name, (shared, depth) in cases.items():
        times = _timed(shared, [depth(worker) for worker in everyone], count)
        figures[name] = round(statistics.median(times) * 1e6, 1)
        everything += times
    return {"median": round(statistics.median(everything) * 1e6, 1), **figures}


def _timed(shared: int, depths: list[int], count: int) -> list[float]:
    """Measure the seconds from a request's names to its worker, names in bytes objects without a cached hash."""
    router = PrefixRouter(FLOPS, LIMITS)
    prefix = _names(NUM_BLOCKS)
    for worker, depth in enumerate(depths):
        router.fleet.join(worker, 1 << 80)
        router.fleet.accept(worker, True)
        router.fleet.index.commit(router.fleet.workers[worker].bit, prefix[:depth])
    times = []
    for number in range(-KEPT, count):
        hashes = [bytes(bytearray(name)) for name in prefix[:shared]] + _names(NUM_BLOCKS - shared)
        job = Job(number, PROMPT_TOKENS + 5, hashes)
        started = time.perf_counter()
        router.submit(job, 0.0)
        [_] = router.route(0.0)
        took = time.perf_counter() - started
        if number >= 0:
            times.append(took)
            router.withdraw(number - KEPT)
    return times


def _names(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def _hash_rate() -> float:
    hasher = BlockHasher(os.urandom(32), "model", BLOCK_SIZE)
    tokens, root = list(range(PROMPT_TOKENS)), hasher.root("tenant")
    started = time.perf_counter()
    hasher.extend([], root, tokens)
    return PROMPT_TOKENS / (time.perf_counter() - started)


def _index_bytes() -> int:
    """Bytes of the index for a block that one worker has."""
    router = PrefixRouter(FLOPS, LIMITS)
    router.fleet.join(0, 1)
    count = 100_000
    gc.collect()
    tracemalloc.start()
    for _ in itertools.repeat(None, count // NUM_BLOCKS):
        router.fleet.index.commit(1, _names(NUM_BLOCKS))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return round(taken / (count // NUM_BLOCKS * NUM_BLOCKS))


if __name__ == "__main__":
    print(measure("--quick" in sys.argv))
