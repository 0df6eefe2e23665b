"""Times of every kernel against the limits of the GPU, which are measured in the same run.

A kernel's lower bound is the larger of two times. One is for the bytes that it must move, at the
bandwidth of a large copy or a large sum, the higher of both. The other is for its operations, at
the rate of a large bfloat16 product. Launches are replayed from a CUDA graph, so that Python's time
is not the kernel's; the L2 cache is emptied before each.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.kernels.cuda_transfer import measure_transfers
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from benchmarks.kernels.cases import KernelCase

REPEATS = 50
GEMM_SIZE = 8192
COPY_BYTES = 2 << 30


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """Measure ceilings, kernels, and transfers between processes; tell after each."""
    if not torch.cuda.is_available():
        raise CommandError(
            "kernels needs a CUDA device, and a torch that was built for it", Exit.UNHEALTHY
        )
    return _measured(quick)


def _measured(quick: bool) -> Iterator[dict[str, Any]]:
    # These need triton.
    from benchmarks.kernels.cases import all_cases
    from benchmarks.kernels.tiles import measure_tiles

    repeats = REPEATS // 5 if quick else REPEATS
    timer = Timer(repeats)
    ceilings = Ceilings.measured(timer)
    figures: dict[str, Any] = {"ceilings": ceilings.told(), "kernels": {}}
    notes = [
        "share_of_ceiling: the floor over the median time; 1 would be the measured ceiling",
        "other names with _us: the same result by others, under the same clock; a text says why there is none",
        *(["quick: fewer cases and repeats, the same code path"] if quick else []),
    ]
    failed: list[str] = []
    result: dict[str, Any] = {
        "config": {"repeats": repeats, "dtype": "bfloat16", "device": device_facts()},
        "figures": figures,
        "notes": notes,
    }
    for make in all_cases(quick):
        name = " ".join([make.func.__name__, *map(str, make.args)])
        try:
            kernel, case, found = _figures(make, timer, ceilings)
            figures["kernels"].setdefault(kernel, {})[case] = found
        # Others may still be measured, whatever this was.
        except Exception as error:
            failed.append(name)
            notes.append(f"{name}: {type(error).__name__}: {error}"[:400])
        torch.cuda.empty_cache()
        yield result
    figures["ceilings_after"] = Ceilings.measured(timer).told()
    yield result
    figures["transfers"], more = measure_transfers("cuda", repeats)
    notes += more
    yield result
    if not quick:
        figures["tiles_us"] = {}
        for name, times in measure_tiles(timer):
            figures["tiles_us"][name] = times
            yield result
    yield result | {"failed": f"not measured: {', '.join(failed)}" if failed else None}


@dataclass(frozen=True)
class Ceilings:
    """Rates of the device that kernels are compared with.

    Attributes:
        copied: bytes a second of a large copy, read and written ones counted.
        read: bytes a second of a large sum, which writes next to nothing: more than a copy may come to.
        rate: operations a second of a large product.
    """

    copied: float
    read: float
    rate: float

    @classmethod
    def measured(cls, timer: "Timer") -> "Ceilings":
        """Measure all three."""
        return cls(copy_bandwidth(timer), read_bandwidth(timer), gemm_rate(timer))

    def floor_us(self, num_bytes: int, num_operations: int) -> float:
        """Count the microseconds below which that work cannot be done."""
        return 1e6 * max(num_bytes / max(self.copied, self.read), num_operations / self.rate)

    def told(self) -> dict[str, float]:
        """Tell them in the units of data sheets."""
        return {
            "copy_gb_per_s": round(self.copied / 1e9, 1),
            "read_gb_per_s": round(self.read / 1e9, 1),
            "gemm_bf16_tflops": round(self.rate / 1e12, 1),
        }


def _figures(
    make: "Callable[[], KernelCase]", timer: "Timer", ceilings: Ceilings
) -> tuple[str, str, dict[str, Any]]:
    """Measure one case; return the names of its kernel and of itself, and its figures."""
    case = make()
    time_us, spread_us = timer(case.kernel)
    floor_us = ceilings.floor_us(case.num_bytes, case.num_operations)
    figures = {
        "relative_error": case.relative_error(),
        "time_us": time_us,
        "time_us_quartiles": spread_us,
        "floor_us": round(floor_us, 2),
        "share_of_ceiling": round(floor_us / time_us, 3),
        **{f"{name}_us": _time_of_peer(timer, peer) for name, peer in case.peers.items()},
    }
    return case.kernel_name, case.name, figures


class Timer:
    """Times work on the device: medians of many replays, the L2 cache emptied before each."""

    def __init__(self, repeats: int) -> None:
        """Set aside a buffer several times the size of the cache."""
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        self._repeats = repeats
        self._flush = torch.empty(4 * cache, dtype=torch.int8, device="cuda")

    def __call__(self, work: Callable[[], object]) -> tuple[float, list[float]]:
        """Time ``work``; the median and the quartiles in microseconds."""
        replay = captured(work)
        pairs = []
        for _ in range(self._repeats):
            self._flush.zero_()
            start, end = _event(), _event()
            start.record()
            replay()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        times = sorted(1e3 * start.elapsed_time(end) for start, end in pairs)
        quartiles = [times[len(times) // 4], times[-1 - len(times) // 4]]
        return round(median(times), 2), [round(time, 2) for time in quartiles]


def _time_of_peer(timer: Timer, peer: Callable[[], Callable[[], object]]) -> float | str:
    """Time others' code; its failure is its result."""
    try:
        return timer(peer())[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """Capture ``work`` as one graph; work that waits for the device cannot be captured, and is returned unchanged."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Compiles, and sets up the libraries' handles.
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    if getattr(work, "waits", False):
        return work
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            work()
    finally:
        # A capture that fails leaves its own stream.
        torch.cuda.set_stream(here)
    return graph.replay


def copy_bandwidth(timer: Timer) -> float:
    """Measure the bytes a second of a large copy, read and written ones counted."""
    source = torch.randint(-128, 128, (COPY_BYTES,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    time_us, _ = timer(lambda: target.copy_(source))
    return 2 * COPY_BYTES / time_us * 1e6


def read_bandwidth(timer: Timer) -> float:
    """Measure the bytes a second of a large sum, which writes next to nothing: more than a copy may come to."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    time_us, _ = timer(lambda: source.sum())
    return COPY_BYTES / time_us * 1e6


def gemm_rate(timer: Timer) -> float:
    """Measure the operations a second of a large bfloat16 product of random numbers."""
    left, right = torch.randn(2, GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16).unbind()
    out = torch.empty_like(left)
    time_us, _ = timer(lambda: torch.mm(left, right, out=out))
    return 2 * GEMM_SIZE**3 / time_us * 1e6


def device_facts() -> dict[str, Any]:
    """The device that was measured on."""
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "l2_cache_bytes": facts.L2_cache_size,
        "cuda": torch.version.cuda,
    }
