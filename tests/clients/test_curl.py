"""curl, as in the documentation: a stream line by line, an error with its status."""

import json
import subprocess
from typing import Any

from tests.suites import Suite
from tests.waiting import HANG_S


def curl(suite: Suite, path: str, body: dict[str, Any], *flags: str) -> str:
    command = ["curl", "-sS", *flags, f"{suite.url}{path}"]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=True
    ).stdout


def test_a_stream_ends_with_a_reason_and_done(suite: Suite) -> None:
    body = {"model": "demo", "prompt": "Once upon", "max_tokens": 4, "stream": True}

    events = curl(suite, "/v1/completions", body, "-N").split("\n\n")

    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_an_error_is_json_with_its_status(suite: Suite) -> None:
    answer = curl(suite, "/v1/completions", {"prompt": []}, "-w", "\n%{http_code}")

    text, status = answer.rsplit("\n", 1)
    assert status == "400"
    assert json.loads(text)["error"]["param"] == "prompt"
