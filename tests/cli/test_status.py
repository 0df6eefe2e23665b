"""What ``moesaic status`` makes of what services count, and how it is shown."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moesaic.cli.clients.fleet import service_facts
from moesaic.cli.clients.load import service_load
from moesaic.cli.commands.status import _print, common_host, load_row, numbers_lines
from moesaic.cli.terminal.console import print_entries
from moesaic.cluster.rpc.server import admin_server
from moesaic.engine import metrics as engine
from moesaic.settings import ServiceSettings
from moesaic.telemetry import metrics

SECRET = "s" * 32


async def test_the_load_of_a_worker_is_what_it_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOESAIC_SECRET", SECRET)
    async with admin_server(
        ServiceSettings(secret=SECRET), "attention", worker_id="attention-0"
    ) as server:
        server.status.metrics_address, server.status.model = "127.0.0.1:9", "demo"
        engine.RUNNING.set(3)
        engine.WAITING.set(1)
        engine.BLOCKS.set(1024)
        engine.BLOCKS_USED.set(256)
        sampled, snapshot = asyncio.Event(), metrics.snapshot

        def sample() -> dict[str, float]:
            sampled.set()
            return snapshot()

        monkeypatch.setattr(metrics, "snapshot", sample)
        asked = asyncio.create_task(service_load("attention", server.address, 0.1))
        await sampled.wait()
        engine.STEP_ROWS.observe(1000)
        load = await asked
        facts = await service_facts("attention", "attention-0", server.address)

    assert (facts["metrics_address"], facts["model"]) == ("127.0.0.1:9", "demo")
    rate = load.pop("tokens_per_s")
    # 1,000 within a tenth of a second or, on a busy machine, more.
    assert 0 < rate <= 10_000
    assert load == {"running": 3, "waiting": 1, "kv_blocks": 1024, "kv_blocks_used": 256}


async def test_who_does_not_answer_has_no_load() -> None:
    assert await service_load("attention", "127.0.0.1:1") == {}


def test_a_load_is_shown_as_far_as_it_is_known() -> None:
    busy = {"running": 3, "waiting": 1, "kv_blocks": 1024, "kv_blocks_used": 256}

    assert load_row({**busy, "tokens_per_s": 41.5}) == (3, 1, "256 of 1024 (25%)", "41.5 tokens/s")
    assert load_row({"rows_per_s": 0.0}) == ("", "", "", "0 rows/s")


def test_numbers_are_shown_once_if_all_workers_hold_their_weights_alike() -> None:
    gateway = {"id": "gateway", "dtype": "", "quantization": ""}
    near, far = ({"id": name, "dtype": "float32", "quantization": "none"} for name in ("a", "e"))
    other = {"id": "o", "dtype": "float32", "quantization": "int8"}

    assert numbers_lines([gateway, {"id": "unreachable"}]) == []
    assert numbers_lines([gateway, near, far]) == ["weights in float32"]
    assert numbers_lines([near, other, far]) == [
        "weights in float32: a, e",
        "weights in float32 int8: o",
    ]


def test_addresses_of_one_host_are_shown_by_their_ports() -> None:
    assert common_host(["127.0.0.1:1", "", "127.0.0.1:2"]) == "127.0.0.1:"
    assert common_host(["[::1]:1"]) == "[::1]:"
    assert common_host(["10.0.0.1:1", "10.0.0.2:1"]) == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_suite_is_shown_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")  # no colours
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)

    _print(suite())

    shown = capsys.readouterr().out
    for part in ("serves demo", "attention-0", "44161", "40767", "62500", "25%", "1234.5 tokens/s"):
        assert part in shown
    assert "attention-0 waits for: expert workers" in shown
    assert "attention-0 was started again, restarts: 12" in shown
    assert shown.count("unreachable") == 4  # in one piece
    if terminal:
        assert max(map(len, shown.splitlines())) <= 80


def test_notes_stand_below_their_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    print_entries(("when", "epoch"), [("10:00", 7), ("11:00", 8)], ["why " * 30, ""])

    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [" when   epoch", " 10:00  7"]
    assert lines[2].startswith("     why why")
    assert max(map(len, lines)) <= 80
    assert lines[-1] == " 11:00  8"


def suite() -> dict[str, Any]:
    """The facts of a suite whose processes have long numbers."""
    attention = {"running": 64, "waiting": 512, "kv_blocks": 65536, "kv_blocks_used": 16384}
    loads: dict[str, dict[str, Any]] = {
        "gateway": {"running": 576, "tokens_per_s": 987.6},
        "scheduler": {},
        "attention-0": {**attention, "tokens_per_s": 1234.5},
        "expert-0": {"rows_per_s": 12345.6},
    }
    services = [
        {
            "id": name,
            "role": name.partition("-")[0],
            "pid": 4194303,
            "state": "unreachable",
            "epoch": 12345,
            "restarts": 12,
            "admin_address": "127.0.0.1:44161",
            "metrics_address": "127.0.0.1:40767",
            "data_address": "127.0.0.1:62500",
            "waiting_for": ["expert workers"] if name == "attention-0" else [],
            "load": load,
        }
        for name, load in loads.items()
    ]
    return {
        "url": "http://127.0.0.1:8000",
        "model": "demo",
        "ready": True,
        "waiting_for": [],
        "other_protocol": [],
        "services": services,
        "placement": None,
    }
