"""Samples of what the processes of a suite hold, at work and idle: memory, files, tasks, blocks."""

import os
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from moesaic.v1 import admin_pb2, attention_pb2
from moesaic.v1.admin_pb2_grpc import AdminServiceStub
from moesaic.v1.attention_pb2_grpc import AttentionServiceStub
from tests.suites import Suite

CALL_S = 10
MB = 1 << 20
REQUESTS = re.compile(r'moesaic_requests_total\{.*route="(?!/livez|/readyz|/health|/metrics)')
COUNTED = {  # series of GetStats: what is held now, and must be nothing when nobody asks
    "gateway": ("moesaic_requests_inflight",),
    "attention": (
        "moesaic_num_requests_running",
        "moesaic_num_requests_waiting",
        "moesaic_kv_blocks_used",
    ),
}


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    name: str
    pid: int
    at_s: float
    resident_mb: float
    num_files: int
    num_threads: int
    num_tasks: int  # of its event loop; -1: it has none, or did not answer
    held: dict[str, float] = field(default_factory=dict)


class Watch:
    """Samples of one suite; times count from its making."""

    def __init__(self, suite: Suite) -> None:
        self.samples: list[Sample] = []
        self._suite, self._started = suite, time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the watch began."""
        return time.monotonic() - self._started

    def look(self) -> list[Sample]:
        """Sample every process that runs now."""
        samples = []
        for process in self._suite.state()["processes"]:
            with suppress(OSError):  # it ended in between
                samples.append(self._sample(process))
        self.samples += samples
        return samples

    def counted(self) -> dict[str, float]:
        """Read the gateway's counters: requests that are not about its health, streams without an end."""
        gateway = next(p for p in self._suite.state()["processes"] if p["role"] == "gateway")
        with self._suite.blocking_channel(gateway["admin_address"]) as channel:
            request = admin_pb2.GetStatsRequest()
            values = AdminServiceStub(channel).GetStats(request, timeout=CALL_S).values
        return {
            "requests": sum(values[series] for series in values if REQUESTS.match(series)),
            "truncations": values["moesaic_stream_truncations_total"],
        }

    def lives(self, since_s: float, until_s: float, age_s: float) -> Iterator[list[Sample]]:
        """The samples of each process id in that time, without those of the first ``age_s`` after a restart."""
        begun = {sample.pid: sample.at_s for sample in reversed(self.samples)}
        for pid, first_s in begun.items():
            from_s = max(since_s, first_s + age_s if first_s > self.samples[0].at_s + 1 else 0)
            life = [sample for sample in self.samples if sample.pid == pid]
            yield [sample for sample in life if from_s <= sample.at_s <= until_s]

    def _sample(self, process: dict[str, Any]) -> Sample:
        place = Path(f"/proc/{process['pid']}")
        num_tasks, held = -1, {}
        if process["admin_address"]:
            with suppress(grpc.RpcError):  # it is being started, or was killed
                num_tasks, held = _asked(self._suite, process)
        return Sample(
            name=process["name"],
            pid=process["pid"],
            at_s=round(self.now_s, 1),
            resident_mb=_resident_bytes(place) / MB,
            num_files=len(os.listdir(place / "fd")),
            num_threads=len(os.listdir(place / "task")),
            num_tasks=num_tasks,
            held=held,
        )


def _resident_bytes(place: Path) -> int:
    return int((place / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _asked(suite: Suite, process: dict[str, Any]) -> tuple[int, dict[str, float]]:
    with suite.blocking_channel(process["admin_address"]) as channel:
        admin = AdminServiceStub(channel)
        tasks = admin.DumpTasks(admin_pb2.DumpTasksRequest(), timeout=CALL_S).text
        values = admin.GetStats(admin_pb2.GetStatsRequest(), timeout=CALL_S).values
        held = {name: values[name] for name in COUNTED.get(process["role"], ()) if name in values}
        if process["role"] == "attention":
            load = AttentionServiceStub(channel).GetLoad(
                attention_pb2.GetLoadRequest(), timeout=CALL_S
            )
            held |= {"blocks": load.kv_blocks_used, "open": load.num_running + load.num_waiting}
    return sum(line.startswith("task ") for line in tasks.splitlines()), held


def slope_per_hour(samples: list[Sample]) -> float:
    """MB of resident memory that a process gains in an hour: the median of the slopes between all pairs of samples."""
    slopes = [
        (later.resident_mb - earlier.resident_mb) / (later.at_s - earlier.at_s)
        for index, earlier in enumerate(samples)
        for later in samples[index + 1 :]
        if later.at_s > earlier.at_s
    ]
    return statistics.median(slopes) * 3600 if slopes else 0.0
