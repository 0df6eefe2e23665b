"""Workers that have other weights than their cluster, or the same in other numbers, never join, and it is said."""

import json
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cluster.redis.child import start_redis
from tests.suites import DEMO, MOESAIC, eventually, running

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


@pytest.fixture
def redis_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    redis, url = start_redis(tmp_path / "redis")
    monkeypatch.setenv("REDIS_URL", url)
    monkeypatch.setenv("MOESAIC_SECRET", secrets.token_hex(16))
    yield url
    redis.terminate()
    redis.wait()


def told(log: Path, event: str) -> list[dict[str, Any]]:
    lines = [line for line in log.read_text().splitlines() if line[:1] + line[-1:] == "{}"]
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


@pytest.mark.usefixtures("redis_url")
@pytest.mark.timeout(240)
def test_workers_in_other_numbers_are_refused_by_name(tmp_path: Path) -> None:
    unlike = {
        "expert": ("--quantization", "int8"),
        "attention": ("--dtype", "bfloat16"),
    }
    with running(tmp_path, "--topology", "local") as suite:
        strangers = {}
        for role, flags in unlike.items():
            log = tmp_path / f"{role}.log"
            command = [str(MOESAIC), "serve", role, "--worker-id", f"{role}-9", "--model"]
            with log.open("w") as output:
                strangers[log] = subprocess.Popen(
                    [*command, str(DEMO), *flags], stdout=output, stderr=output, cwd=tmp_path
                )
        try:
            for log, process in strangers.items():
                flag, value = unlike[log.stem]
                eventually(lambda log=log: told(log, "worker.other_weights"))  # type: ignore[misc]
                [entry] = told(log, "worker.other_weights")
                assert "attention-0 has --dtype float32 --quantization none" in entry["cause"]
                assert f"{flag} {value}" in entry["cause"]
                assert f"{log.stem}-9" in entry["cause"]
                assert not told(log, "worker.ready")
                assert process.poll() is None
            facts = json.loads(suite.cli("status", "--json").stdout)
            services = {service["id"]: service for service in facts["services"]}
            numbers = {
                name: (services[name]["dtype"], services[name]["quantization"])
                for name in ("attention-0", "expert-9", "attention-9")
            }
            assert numbers == {
                "attention-0": ("float32", "none"),
                "expert-9": ("float32", "int8"),
                "attention-9": ("bfloat16", "none"),
            }
            assert "attention-0 has --dtype" in str(services["expert-9"]["waiting_for"])
            assert httpx.post(f"{suite.url}/v1/completions", json=BODY).status_code == 200
        finally:
            for process in strangers.values():
                process.terminate()
        assert [process.wait(60) for process in strangers.values()] == [0, 0]


@pytest.mark.usefixtures("redis_url")
@pytest.mark.timeout(240)
def test_a_worker_with_one_flipped_bit_never_joins(tmp_path: Path, damaged: Path) -> None:
    with running(tmp_path, "--topology", "local") as suite:
        fingerprint = httpx.post(f"{suite.url}/v1/completions", json=BODY).json()[
            "system_fingerprint"
        ]
        strangers = {}
        for role in ("attention", "expert"):
            log = tmp_path / f"{role}.log"
            command = [str(MOESAIC), "serve", role, "--worker-id", f"{role}-9"]
            with log.open("w") as output:
                strangers[log] = subprocess.Popen(
                    [*command, "--model", str(damaged)], stdout=output, stderr=output, cwd=tmp_path
                )
        try:
            for log, process in strangers.items():
                eventually(lambda log=log: told(log, "worker.other_weights"))  # type: ignore[misc]
                [entry] = told(log, "worker.other_weights")
                assert fingerprint == f"fp_{entry['cluster_digest'][:12]}"
                assert entry["own_digest"] != entry["cluster_digest"]
                assert not told(log, "worker.ready")
                assert process.poll() is None
            status = suite.cli("status", "--json").stdout
            assert "the weights of this cluster" in status
            again = httpx.post(f"{suite.url}/v1/completions", json=BODY).json()
            assert again["system_fingerprint"] == fingerprint
        finally:
            for process in strangers.values():
                process.terminate()
        assert [process.wait(60) for process in strangers.values()] == [0, 0]
