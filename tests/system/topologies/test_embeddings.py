"""Vectors stay the same, wherever the experts are."""

from typing import Any

import pytest


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors_do_not_depend_on_where_experts_are(
    local: Any, disaggregated: Any, gathered: Any, pooling: str
) -> None:
    inputs = ["Anna was in the garden. " * times for times in (1, 9, 60)]
    body = {"model": "demo", "input": inputs, "moesaic": {"pooling": pooling}}
    found = []
    for suite in (local, disaggregated, gathered):
        with suite.client() as client:
            answer = client.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        found.append([item["embedding"] for item in answer.json()["data"]])

    for one, *others in zip(*found, strict=True):
        for other in others:
            assert other == pytest.approx(one, abs=1e-4)
