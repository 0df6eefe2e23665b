"""Scoring without stored KV through all processes: the same numbers, and nothing found afterwards."""

from typing import Any

import pytest

TEXT = "please move twenty euros from my savings to my checking account before the weekend " * 12
LABELS = ["banking", "travel", "cooking", "work and career"]


def classify(suite: Any, text: str, labels: list[str] = LABELS, **extension: Any) -> dict[str, Any]:
    body = {"input": text, "labels": labels, "method": "sequence", "moesaic": extension}
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


def test_as_many_labels_as_a_prompt_can_name_fit_without_stored_kv(local: Any) -> None:
    labels = [f"subject {i}" for i in range(350)]

    free, stored = (classify(local, "ships", labels, store_kv=kept) for kept in (False, True))

    assert free["data"] == stored["data"]


def test_siblings_share_their_text_without_stored_kv(local: Any) -> None:
    questions = [{"type": "predicate", "instructions": f"It has {n} words."} for n in range(24)]
    told = []
    with local.client() as client:
        for kept in (False, True):
            body = {
                "input": TEXT,
                "questions": questions,
                "moesaic": {"store_kv": kept},
                "cache_salt": "swept siblings",
            }
            told.append(client.post("/v1/decisions", json=body).raise_for_status().json())

    free, stored = told
    assert free["answers"] == stored["answers"]
    # The first may be computed before the others are there, and some of these before the rest.
    assert free["moesaic"]["cached_tokens"] > 0.5 * stored["moesaic"]["cached_tokens"] > 1000
