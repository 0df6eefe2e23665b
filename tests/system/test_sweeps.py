"""Scoring without stored KV through all processes: the same numbers, and nothing found afterwards."""

from typing import Any

import pytest

TEXT = "please move twenty euros from my savings to my checking account before the weekend " * 12
LABELS = ["banking", "travel", "cooking", "work and career"]


def classify(suite: Any, text: str, **extension: Any) -> dict[str, Any]:
    body = {"input": text, "labels": LABELS, "method": "sequence", "moesaic": extension}
    body["cache_salt"] = "sweeps"  # others have asked this suite questions that begin alike
    with suite.client() as client:
        answer = client.post("/v1/classify", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("topology", ["local", "disaggregated"])
def test_declining_stored_kv_changes_no_number(
    request: pytest.FixtureRequest, topology: str
) -> None:
    suite = request.getfixturevalue(topology)
    free = [classify(suite, f"{topology} {TEXT}", store_kv=False) for _ in range(2)]
    stored = [classify(suite, f"{topology} {TEXT}") for _ in range(2)]

    assert free[0]["data"] == free[1]["data"] == stored[0]["data"]
    assert free[0]["usage"]["prompt_tokens"] > 150
    cached = [answer["moesaic"]["cached_tokens"] for answer in (*free, *stored)]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0
