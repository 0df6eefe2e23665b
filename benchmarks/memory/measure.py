"""The memory of each process of a running suite, beside that of the plan.

A process's share of memory is its PSS: pages that several processes share are divided among them. Before it is read,
requests have filled the KV and run the largest steps, as the plan counts both.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.common.suite import RunningSuite, clean_environment, running_suite

ROWS, SEQUENCES, KV_BLOCKS = 512, 8, 256
# Sizes that a few requests fill.
LIMITS = (
    f"--max-num-batched-tokens={ROWS}",
    f"--max-num-seqs={SEQUENCES}",
    f"--kv-blocks={KV_BLOCKS}",
    "--sweep-bytes=0",
)
PROMPT_TOKENS, ANSWER_TOKENS = 480, 24


@dataclass(frozen=True)
class MeasuredProcess:
    """One process: bytes as planned and as found."""

    name: str
    planned: int
    measured: int

    @property
    def error(self) -> float:
        """The plan's relative error."""
        return self.planned / self.measured - 1


def measure(model: Path, *flags: str) -> list[MeasuredProcess]:
    """Start a suite of ``model`` with flags of ``moesaic up``, fill it, and compare its memory with the plan."""
    flags = ("--model", str(model), *flags, *LIMITS)
    planned = planned_bytes(*flags)
    with running_suite(*flags) as suite:
        fill(suite)
        return memory_beside(suite, planned)


def memory_beside(suite: RunningSuite, planned: Mapping[str, int]) -> list[MeasuredProcess]:
    """Read the memory of those processes of a suite that were planned."""
    return [
        MeasuredProcess(name, planned[name], _pss_bytes(process["pid"]))
        for name, process in suite.processes.items()
        if name in planned
    ]


def planned_bytes(*flags: str) -> dict[str, int]:
    """Ask ``moesaic plan`` for the bytes of each process on this machine, by its name."""
    command = [sys.executable, "-m", "moesaic.cli", "plan", "--json"]
    done = subprocess.run(
        [*command, *flags],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        process["name"]: process["machine_bytes"]
        for process in json.loads(done.stdout)["processes"]
    }


def fill(suite: RunningSuite, vocab_size: int = 50_000) -> None:
    """Send as many prompts side by side as the suite runs, twice, each with other tokens below ``vocab_size``."""
    asyncio.run(_fill(suite, vocab_size))


async def _fill(suite: RunningSuite, vocab_size: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{suite.port}", timeout=120) as client:
        [model] = (await client.get("/v1/models")).json()["data"]

        async def ask(number: int) -> None:
            prompt = [(number * 7919 + i * 31) % vocab_size for i in range(PROMPT_TOKENS)]
            body = {
                "model": model["id"],
                "prompt": prompt,
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
                "temperature": 0.8,
            }
            (await client.post("/v1/completions", json=body)).raise_for_status()

        for first in (0, SEQUENCES):
            await asyncio.gather(*(ask(first + n) for n in range(SEQUENCES)))


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
