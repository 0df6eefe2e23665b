"""Batches on a real suite: as documented, and through the death of the gateway."""

import json
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.suites import MOESAIC, ROOT, Suite
from tests.system.operators.test_readme import block, run
from tests.waiting import eventually

PAGE = (ROOT / "docs/use/batch.md").read_text(encoding="utf-8")
PRINTED_URL = "http://127.0.0.1:8000"
NUM_ROWS = 300


@pytest.fixture
def suite(local: Suite) -> Suite:
    return local


def labels(lines: str) -> dict[str, str]:
    results = map(json.loads, lines.splitlines())
    return {r["custom_id"]: r["response"]["body"]["data"][0]["label"] for r in results}


def test_the_examples_of_the_page_work(suite: Suite) -> None:
    run(["bash", "-c", block("cat >", PAGE)], suite)
    run(["bash", "-c", block("moesaic run-batch", PAGE).replace("moesaic", str(MOESAIC))], suite)
    printed = run(
        [sys.executable, "-c", block("import time", PAGE).replace(PRINTED_URL, suite.url)], suite
    )

    by_command = labels((suite.directory / "results.jsonl").read_text(encoding="utf-8"))
    status, _, output = printed.partition("\n")
    assert "completed" in status
    assert labels(output.strip()) == by_command == {"a": "travel", "b": "banking"}


def test_a_batch_survives_the_gateway_with_the_answers_that_the_command_gets(
    suite: Suite, clinc_domain: Path
) -> None:
    rows = [json.loads(row) for row in clinc_domain.read_text().splitlines()[:NUM_ROWS]]
    requests = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/classify",
            "body": {"input": row["text"], "labels": row["labels"]},
        }
        for n, row in enumerate(rows)
    ]
    source = suite.directory / "rows.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    with suite.client() as client, source.open("rb") as content:
        file = client.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
    batch_id = eventually(lambda: begun_batch(suite, file.json()["id"]))

    suite.signal("gateway", signal.SIGKILL)
    batch = eventually(lambda: completed(suite, batch_id))
    with suite.client() as client:
        output = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    done = suite.cli("run-batch", "-i", "rows.jsonl", "-o", "rows.out.jsonl")

    assert done.returncode == 0, done.stderr
    assert batch["request_counts"] == {"total": NUM_ROWS, "completed": NUM_ROWS, "failed": 0}
    assert [json.loads(line)["custom_id"] for line in output.splitlines()] == [
        request["custom_id"] for request in requests
    ]
    assert labels(output) == labels((suite.directory / "rows.out.jsonl").read_text())


def get(suite: Suite, batch_id: str) -> dict[str, Any]:
    with suite.client() as client:
        return dict(client.get(f"/v1/batches/{batch_id}").json())


def begun_batch(suite: Suite, file_id: str) -> str | None:
    """Give a new batch in its middle; none if it was over too soon."""
    body = {"input_file_id": file_id, "endpoint": "/v1/classify", "completion_window": "24h"}
    with suite.client() as client:
        batch_id = str(client.post("/v1/batches", json=body).json()["id"])
    eventually(lambda: get(suite, batch_id)["request_counts"]["completed"] > 0)
    return batch_id if get(suite, batch_id)["status"] == "in_progress" else None


def completed(suite: Suite, batch_id: str) -> dict[str, Any] | None:
    """Return the batch if it is completed, as far as there is a gateway to ask."""
    with suppress(httpx.TransportError):
        batch = get(suite, batch_id)
        return batch if batch.get("status") == "completed" else None
    return None
