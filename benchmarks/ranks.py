"""Costs of dividing an attention worker among ranks, on CPUs: what a layer's messages take, and whole layers.

``messages_us``: time of the messages between two ranks for one layer of attention, by number of
rows. It is measured as implemented, where the first rank has the residual stream: it sends the
rows, and adds up. It is also measured as if both ranks had the stream, with two sums for both, of
attention and of experts. ``layer_us``: a layer without experts, in one rank with one thread and
with two, and in two ranks with one thread each.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.models import QWEN3_30B, write_model
from benchmarks.common.ranks import Ranks, load_part
from moesaic.models.layers.decoder import Decoder
from moesaic.models.layers.step_batch import StepBatch
from moesaic.models.layers.warm_up import experts_elsewhere
from moesaic.models.tensor_parallel.meeting import file_store, meeting_file, stay_on_interface

HIDDEN, LAYERS = QWEN3_30B["hidden_size"], 4
CONFIG: dict[str, Any] = {**QWEN3_30B, "vocab_size": 8192, "num_hidden_layers": LAYERS}
CONTEXT = 512
STEPS = {"1 row": (1, CONTEXT), "8 rows": (8, CONTEXT), "prompt of 512": (512, 0)}
ROUNDS, TIMES = 5, 8


def run(quick: bool) -> dict[str, Any]:
    """Measure messages, then layers, each in rounds in which all take turns."""
    rounds = 2 if quick else ROUNDS
    messages = _measure_messages(rounds)
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), CONFIG, "float32", with_experts=False)
        layers = _measure_layers(Path(directory), rounds)
    return {
        "config": {"model": CONFIG, "steps": STEPS, "rounds": rounds},
        "figures": {"messages_us": messages, "layer_us": layers},
        "notes": [
            "random weights of the attention of Qwen3-30B-A3B, float32, no experts; medians over rounds",
            "two ranks are two processes of one machine, by gloo; on GPUs NCCL does the same",
        ],
    }


def _measure_messages(rounds: int) -> dict[str, Any]:
    sizes = {"1 row": 1, "8 rows": 8, "512 rows": 512}
    ways = ("told_and_added_up", "added_up_in_both")
    stay_on_interface("127.0.0.1")
    with meeting_file() as path:
        process = multiprocessing.get_context("spawn").Process(
            target=_other_rank, args=(path, rounds, tuple(sizes.values())), daemon=True
        )
        process.start()
        dist.init_process_group("gloo", store=file_store(path, 2), rank=0, world_size=2)
        taken = list(_in_turn(rounds, tuple(sizes.values())))
        dist.destroy_process_group()
        process.join(20)
    found: dict[str, dict[str, list[float]]] = {way: {name: [] for name in sizes} for way in ways}
    names = {count: name for name, count in sizes.items()}
    for count, seconds in taken:
        for way, each in zip(ways, seconds, strict=True):
            found[way][names[count]].append(1e6 * each)
    return {
        way: {n: round(statistics.median(v)) for n, v in by.items()} for way, by in found.items()
    }


def _other_rank(path: str, rounds: int, sizes: tuple[int, ...]) -> None:
    stay_on_interface("127.0.0.1")
    dist.init_process_group("gloo", store=file_store(path, 2), rank=1, world_size=2)
    for _ in _in_turn(rounds, sizes):
        pass
    dist.destroy_process_group()


def _in_turn(rounds: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, tuple[float, float]]]:
    def told_and_added_up(rows: Tensor) -> None:
        dist.broadcast(rows, 0)
        dist.reduce(rows, 0)

    def added_up_in_both(rows: Tensor) -> None:
        dist.all_reduce(rows)
        dist.all_reduce(rows)

    for _ in range(rounds):
        for count in sizes:
            rows = torch.zeros(count, HIDDEN)
            told = _timed(partial(told_and_added_up, rows))
            yield count, (told, _timed(partial(added_up_in_both, rows)))


def _measure_layers(directory: Path, rounds: int) -> dict[str, Any]:
    ranks = Ranks(2)
    alone = load_part(directory, 0, 1)
    found: dict[str, dict[str, list[float]]] = {}
    try:
        with ranks.led(directory) as divided:
            ways = {
                "one_rank_one_thread": (alone, 1),
                "one_rank_two_threads": (alone, 2),
                "two_ranks": (divided, 1),
            }
            steps = {name: _steps(decoder) for name, (decoder, _) in ways.items()}
            for _ in range(rounds):
                for name, (_, threads) in ways.items():
                    with _threads(threads):
                        for step, work in steps[name].items():
                            took = found.setdefault(name, {}).setdefault(step, [])
                            took.append(1e6 * _timed(work) / LAYERS)
    finally:
        ranks.close()
    return {
        way: {n: round(statistics.median(v)) for n, v in by.items()} for way, by in found.items()
    }


def _steps(decoder: Decoder) -> dict[str, Callable[[], object]]:
    cache = decoder.new_kv_cache(8 * (CONTEXT // 16 + 1))
    found: dict[str, Callable[[], object]] = {}
    for name, (count, behind) in STEPS.items():
        sequences, each = (count, 1) if behind else (1, count)
        batch = StepBatch(
            token_ids=[7] * count,
            positions=[behind + i for _ in range(sequences) for i in range(each)],
            sequence_rows=[each] * sequences,
            block_tables=[
                [33 * s + i for i in range((behind + each - 1) // 16 + 1)] for s in range(sequences)
            ],
            wanted=[0] * sequences,
        )

        def work(batch: StepBatch = batch) -> object:
            return asyncio.run(decoder.forward(batch, cache, experts_elsewhere, every_row=True))

        found[name] = work
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(work: Callable[[], object]) -> float:
    work()
    began = time.perf_counter()
    for _ in range(TIMES):
        work()
    return (time.perf_counter() - began) / TIMES
