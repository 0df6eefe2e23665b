"""The load generator against a real suite."""

import json

import pytest

from tests.suites import Suite

pytestmark = pytest.mark.suite


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_load_on_a_suite_counts_every_token(local: Suite, backend: str) -> None:
    size = ("--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "5")
    saving = ("--save-result", "--save-detailed", "--result-filename", f"{backend}.json")
    more = ("--max-concurrency", "3", "--request-rate", "50", "--goodput", "e2el:3600000")

    done = local.cli("bench", "serve", local.url, "--backend", backend, *size, *saving, *more)

    assert done.returncode == 0, done.stderr
    found = json.loads((local.directory / f"{backend}.json").read_text())
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["output_lens"] == [5] * 6
    if backend == "openai":
        assert found["input_lens"] == [20] * 6
    assert found["max_concurrent_requests"] <= 3
    assert found["request_goodput"] == found["request_throughput"]
    assert all(ttft > 0 for ttft in found["ttfts"])
