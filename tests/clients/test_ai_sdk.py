"""Vercel's AI SDK against a real suite, by each of its providers that speak one of our APIs."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.npm import installed
from tests.suites import Suite
from tests.waiting import HANG_S

SCRIPT = Path(__file__).parent / "npm" / "ai.mjs"


@pytest.fixture(params=["compatible", "chat", "responses", "messages"])
def told(suite: Suite, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What the script got by one provider."""
    # Imports are looked up beside the script.
    (tmp_path / "node_modules").symlink_to(installed("ai").parent)
    script = shutil.copy(SCRIPT, tmp_path)
    command = ["node", script, suite.url, request.param]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_texts_objects_tools_and_errors_are_read(told: dict[str, Any]) -> None:
    assert told["whole"] == told["streamed"] != ""
    assert told["num_pieces"] > 1
    assert told["reasons"] == ["length"] * 2
    assert told["tokens"] == [6, 6]
    for verdict in told["objects"]:
        assert verdict["topic"] in ("banking", "travel", "work")
        assert isinstance(verdict["urgent"], bool)
    assert told["objects"] == told["objects"][:1] * 3
    assert set(told["cities"]) <= {"Paris", "Rome"}
    assert told["kinds"] == told["streamed_kinds"] == ["tool-call", "tool-result", "text"]
    assert told["answers"][0] == told["answers"][1] != ""
    status, message = told["refused"]
    assert status == 400
    assert "2048" in message
    assert told["warnings"] == []
