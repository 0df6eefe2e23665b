"""Differences of our layers to transformers, on random checkpoints of every family and option."""

import tempfile
from pathlib import Path
from typing import Any

import transformers

from benchmarks.parity.cases import (
    CASES,
    ParityCase,
    Served,
    build_reference,
    prompt_of,
    reference_greedy,
    reference_logits,
)

PROMPT_TOKENS = 41
GREEDY_TOKENS = 32


def run(quick: bool) -> dict[str, Any]:
    """Compare logits and greedy tokens; ``quick`` takes one prompt a configuration instead of four.

    Returns:
        ``config``, ``figures`` per family (largest difference of any logit, greedy tokens that are the same up to
        the first that is not, their number in all, and configurations) and ``notes``.
    """
    num_prompts = 1 if quick else 4
    figures: dict[str, dict[str, Any]] = {}
    for case in CASES:
        difference, matches = _compare(case, num_prompts)
        family = figures.setdefault(
            case.family,
            {
                "max_abs_logit_diff": 0.0,
                "greedy_match_tokens": 0,
                "greedy_tokens": 0,
                "configurations": 0,
            },
        )
        family["max_abs_logit_diff"] = max(family["max_abs_logit_diff"], difference)
        family["greedy_match_tokens"] += matches
        family["greedy_tokens"] += num_prompts * GREEDY_TOKENS
        family["configurations"] += 1
    return {
        "config": {
            "dtype": "float32",
            "device": "cpu",
            "prompts": num_prompts,
            "prompt_tokens": PROMPT_TOKENS,
            "transformers": transformers.__version__,
        },
        "figures": figures,
        "notes": [
            "random weights; every prompt is also computed in two chunks beside another sequence",
            *(["quick: one prompt a configuration instead of four"] if quick else []),
        ],
    }


def _compare(case: ParityCase, num_prompts: int) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as directory:
        reference = build_reference(case, Path(directory))
        served = Served(Path(directory))
    difference, matches = 0.0, 0
    for seed in range(num_prompts):
        prompt, other = prompt_of(PROMPT_TOKENS, seed), prompt_of(PROMPT_TOKENS // 2, seed + 100)
        expected = reference_logits(reference, prompt)
        whole = served.forward([(prompt, 0, list(range(6)))])
        cut = PROMPT_TOKENS // 3
        first = served.forward([(prompt[:cut], 0, [9, 8, 7, 6, 5, 4]), (other, 0, [20, 21, 22])])
        rest = served.forward(
            [(other[:1], len(other), [20, 21, 22]), (prompt[cut:], cut, [9, 8, 7, 6, 5, 4])]
        )
        for logits, rows in (
            (whole, expected),
            (first[:cut], expected[:cut]),
            (rest[1:], expected[cut:]),
        ):
            difference = max(difference, float((logits - rows).abs().max()))
        matches += _num_equal(
            served.greedy(prompt, GREEDY_TOKENS), reference_greedy(reference, prompt, GREEDY_TOKENS)
        )
    return difference, matches


def _num_equal(tokens: list[int], expected: list[int]) -> int:
    equal = [token == other for token, other in zip(tokens, expected, strict=True)]
    return equal.index(False) if False in equal else len(equal)
