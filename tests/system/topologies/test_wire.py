"""Rows that travel as bytes: the same answers by rings, without Python, and by UCX, with it."""

from pathlib import Path
from typing import Any

import pytest

from tests.suites import Suite, running
from tests.system.asking import PROMPTS

TOKENS = 24


def answers(suite: Suite) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probabilities, prompt by prompt."""
    found = []
    with suite.client() as client:
        for prompt in PROMPTS:
            body: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": TOKENS}
            body |= {"temperature": 0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
            [choice] = (
                client.post("/v1/completions", json=body).raise_for_status().json()["choices"]
            )
            found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["2", "3"])
def test_suites_of_packed_rows_answer_alike_with_python_and_without(
    local: Suite, tmp_path: Path, experts: str
) -> None:
    # Three workers have a replica too many to deal out evenly: who serves it is measured, unless told.
    flags = ("--experts", experts, "--wire-dtype", "int8", "--expert-scheduling", "static")
    with running(tmp_path, *flags) as suite:
        by_rings = answers(suite)
    with running(tmp_path, *flags, "--transports", "tcp") as suite:
        by_ucx = answers(suite)

    assert by_rings == by_ucx
    exact = answers(local)
    assert all(len(tokens) == TOKENS for tokens, _ in by_rings)
    assert [each for _, each in by_rings] != [each for _, each in exact]  # it is packed
    # Later tokens follow from earlier ones: one that is rounded to another changes all that come behind it.
    for (tokens, logprobs), (expected, exactly) in zip(by_rings, exact, strict=True):
        if tokens[0] == expected[0]:
            assert logprobs[0] == pytest.approx(exactly[0], abs=0.2)
    assert sum(a[0][0] == b[0][0] for a, b in zip(by_rings, exact, strict=True)) >= len(exact) - 1
