"""Real processes that are the ranks after the first; the caller's own process leads."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.parity.cases import CPU, Served
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.division import divide
from moesaic.models.layers.decoder import Decoder
from moesaic.models.tensor_parallel.follower import Follower
from moesaic.models.tensor_parallel.group import RankGroup
from moesaic.models.tensor_parallel.leader import lead
from moesaic.models.tensor_parallel.meeting import file_store, meeting_file, stay_on_interface
from moesaic.models.weights.checkpoint import Checkpoint

Job = tuple[Path, str] | None


def _lost(error: Exception) -> NoReturn:
    raise error


def load_part(
    directory: Path,
    rank: int,
    ranks: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Decoder:
    """Load one rank's part of a model."""
    config = load_config(directory)
    checkpoint = Checkpoint(directory)
    return Decoder.load(checkpoint, config, dtype, device, division=divide(config, rank, ranks))


def _follow(rank: int, ranks: int, kind: str, jobs: "SimpleQueue[Job]") -> None:
    torch.set_num_threads(1)
    device = _device(kind, rank)
    stay_on_interface("127.0.0.1")
    while (job := jobs.get()) is not None:
        directory, meeting = job
        group = RankGroup(rank, ranks, file_store(meeting, ranks), device, _lost)
        Follower(load_part(directory, rank, ranks, device=device), group).run()
        group.close()


def _device(kind: str, rank: int) -> torch.device:
    return CPU if kind == "cpu" else torch.device(kind, rank)


class Ranks:
    """Processes that follow in one model after another."""

    def __init__(self, ranks: int, kind: str = "cpu") -> None:
        """Start all ranks but the first, on one device of a ``kind`` each."""
        self.ranks, spawning = ranks, multiprocessing.get_context("spawn")
        self._kind = kind
        self._jobs = [spawning.SimpleQueue() for _ in range(1, ranks)]
        self.processes = [
            spawning.Process(target=_follow, args=(rank, ranks, kind, jobs), daemon=True)
            for rank, jobs in enumerate(self._jobs, start=1)
        ]
        for process in self.processes:
            process.start()

    @contextmanager
    def led(self, directory: Path) -> Iterator[Decoder]:
        """Compute with a model in all ranks, led from here."""
        stay_on_interface("127.0.0.1")
        with meeting_file() as meeting:
            for jobs in self._jobs:
                jobs.put((directory, meeting))
            device = _device(self._kind, 0)
            group = RankGroup(0, self.ranks, file_store(meeting, self.ranks), device, _lost)
            try:
                yield lead(load_part(directory, 0, self.ranks, device=device), group)
            finally:
                # A test may have killed the others.
                with suppress(RuntimeError):
                    group.close()

    @contextmanager
    def leading(self, directory: Path) -> Iterator[Served]:
        """Serve a model in all ranks, led from here."""
        served = Served(directory)
        with self.led(directory) as served.decoder:
            served.cache = served.decoder.new_kv_cache(num_blocks=64, block_size=8)
            yield served

    def close(self) -> None:
        """Let the processes end."""
        for jobs in self._jobs:
            jobs.put(None)
        for process in self.processes:
            process.join(20)
            process.kill()
