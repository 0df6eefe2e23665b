"""Workers that have other weights than their cluster, or the same in other numbers, never join, and it is said."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.suites import DEMO, MOESAIC, Suite, log_entries
from tests.system.control import environment
from tests.waiting import HANG_S, eventually

BODY = {"prompt": "The quick brown fox", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The demo model with the top bit of one weight's exponent turned over, in one expert."""
    directory = tmp_path / "damaged"
    shutil.copytree(DEMO, directory)
    path = directory / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    place = header["model.layers.2.mlp.experts.5.down_proj.weight"]["data_offsets"][0]
    content[start + place + 2 * 777 + 1] ^= 0x40  # bfloat16, little-endian
    path.write_bytes(content)
    return directory


@contextmanager
def strangers(
    suite: Suite, directory: Path, flags: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, Path]]:
    """Start workers beside a suite, by role with these flags; gives their logs once they are refused."""
    logs = {role: directory / f"{role}.log" for role in flags}
    processes = []
    try:
        for role, log in logs.items():
            command = [str(MOESAIC), "serve", role, "--worker-id", f"{role}-9", *flags[role]]
            with log.open("w") as output:
                started = subprocess.Popen(
                    command, stdout=output, stderr=output, cwd=directory, env=environment(suite)
                )
            processes.append(started)
        for log in logs.values():
            eventually(lambda log=log: told(log, "worker.other_weights"))  # type: ignore[misc]
        yield logs
        assert [process.poll() for process in processes] == [None] * len(processes)
        assert not any(told(log, "worker.ready") for log in logs.values())
    finally:
        for process in processes:
            process.terminate()
        ended = [process.wait(HANG_S) for process in processes]
    assert set(ended) == {0}


def told(log: Path, event: str) -> list[dict[str, Any]]:
    return [entry for entry in log_entries(log) if entry["event"] == event]


def services(suite: Suite) -> dict[str, dict[str, Any]]:
    """Return what the command shows of each service."""
    shown = json.loads(suite.cli("status", "--json").stdout)["services"]
    return {service["id"]: service for service in shown}


def waits(suite: Suite, worker: str, cause: str) -> dict[str, dict[str, Any]] | None:
    """Return all services once this one is shown to wait for something."""
    shown = services(suite)
    there = worker in shown and cause in str(shown[worker]["waiting_for"])
    return shown if there else None


def ask(suite: Suite) -> dict[str, Any]:
    with suite.client() as client:
        answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200
    return dict(answer.json())


@pytest.mark.slow
def test_workers_in_other_numbers_are_refused_by_name(local: Suite, tmp_path: Path) -> None:
    unlike = {"expert": ("--quantization", "int8"), "attention": ("--dtype", "float16")}
    flags = {role: ("--model", str(DEMO), *other) for role, other in unlike.items()}
    with strangers(local, tmp_path, flags) as logs:
        for role, log in logs.items():
            [entry] = told(log, "worker.other_weights")
            assert "attention-0 has --dtype bfloat16 --quantization none" in entry["cause"]
            assert " ".join(unlike[role]) in entry["cause"]
            assert f"{role}-9" in entry["cause"]
        for role in unlike:
            shown = eventually(
                lambda role=role: waits(local, f"{role}-9", "attention-0 has --dtype")
            )  # type: ignore[misc]
        numbers = {
            name: (shown[name]["dtype"], shown[name]["quantization"])
            for name in ("attention-0", "expert-9", "attention-9")
        }
        assert numbers == {
            "attention-0": ("bfloat16", "none"),
            "expert-9": ("bfloat16", "int8"),
            "attention-9": ("float16", "none"),
        }
        ask(local)


def test_a_worker_with_one_flipped_bit_never_joins(
    local: Suite, tmp_path: Path, damaged: Path
) -> None:
    fingerprint = ask(local)["system_fingerprint"]
    flags = dict.fromkeys(("attention", "expert"), ("--model", str(damaged)))
    with strangers(local, tmp_path, flags) as logs:
        for role, log in logs.items():
            [entry] = told(log, "worker.other_weights")
            assert fingerprint == f"fp_{entry['cluster_digest'][:12]}"
            assert entry["own_digest"] != entry["cluster_digest"]
            eventually(lambda role=role: waits(local, f"{role}-9", "the weights of this cluster"))  # type: ignore[misc]
        assert ask(local)["system_fingerprint"] == fingerprint
