"""Vectors stay the same, wherever the experts are."""

from typing import Any

import pytest


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_do_not_depend_on_where_experts_are(
    local: Any, disaggregated: Any, pooling: str
) -> None:
    inputs = ["Anna was in the garden. " * times for times in (1, 9, 60)]
    body = {"model": "demo", "input": inputs, "moesaic": {"pooling": pooling}}
    found = []
    for suite in (local, disaggregated):
        with suite.client() as client:
            answer = client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        found.append([item["embedding"] for item in answer.json()["data"]])

    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
