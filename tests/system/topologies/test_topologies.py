"""Answers stay the same, wherever the experts are."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.system.asking import PROMPTS, complete

ROWS = 150


def classify(suite: Any, rows: Path, out: Path) -> tuple[float, list[str]]:
    done = suite.cli(
        "classify",
        "--file",
        str(rows),
        "--limit",
        str(ROWS),
        "--out",
        str(out),
        "--json",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["errors"] == 0
    answers = {a["id"]: a["label"] for a in map(json.loads, out.read_text().splitlines())}
    return result["accuracy"], [answers[key] for key in sorted(answers)]


def test_classification_is_the_same_in_both_topologies(
    local: Any, disaggregated: Any, clinc_domain: Path, tmp_path: Path
) -> None:
    ours = classify(disaggregated, clinc_domain, tmp_path / "disaggregated.jsonl")
    theirs = classify(local, clinc_domain, tmp_path / "local.jsonl")

    assert ours == theirs
    assert ours[0] >= 0.8  # the floor is 0.85 over all rows; these are the first few


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_do_not_depend_on_where_experts_are(
    local: Any, disaggregated: Any, wide: Any, prompt: str
) -> None:
    reference = complete(local, prompt)

    assert len(reference["token_ids"]) == 48
    assert complete(disaggregated, prompt)["token_ids"] == reference["token_ids"]
    assert complete(wide, prompt)["token_ids"] == reference["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_comes_again_is_found_and_answered_alike(
    local: Any, disaggregated: Any, stream: bool
) -> None:
    body = {
        "model": "demo",
        "prompt": f"Streamed: {stream}. " + "It was in the spring of the year 1881 that " * 3,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }

    def ask(suite: Any, **more: str) -> tuple[str, int, int]:
        with suite.client() as client:
            answer = client.post("/v1/completions", json={**body, **more})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        parts = [json.loads(line) for line in lines if line != "[DONE]"]
        text = "".join(choice["text"] for part in parts for choice in part["choices"])
        usage = parts[-1]["usage"]
        return text, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

    for suite in (local, disaggregated):
        text, cached, length = ask(suite)
        full = (length - 1) // 16 * 16

        assert cached == 0
        assert ask(suite) == (text, full, length)
        assert ask(suite, cache_salt="another tenant") == (text, 0, length)
