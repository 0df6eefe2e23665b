"""Our layers against transformers, on random checkpoints of every family and option."""

from typing import Any

import pytest
import torch

from benchmarks.parity.cases import CASES, Served, build_reference, prompt_of, reference_logits

# float32 rounding, accumulated over three layers in another order of summation
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Served]:
    directory = tmp_path_factory.mktemp("model")
    return build_reference(request.param, directory), Served(directory)


def assert_parity(reference: Any, served: Served) -> None:
    """Compare the logits of a prompt."""
    prompt = prompt_of(41, seed=1)

    logits = served.forward([(prompt, 0, list(range(6)))])

    expected = reference_logits(reference, prompt)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_logits_of_a_prompt_equal_the_reference(pair: tuple[Any, Served]) -> None:
    assert_parity(*pair)


def test_chunks_and_neighbours_of_other_lengths_change_no_logits(pair: tuple[Any, Served]) -> None:
    reference, served = pair
    a, b, c = prompt_of(41, seed=1), prompt_of(23, seed=2), prompt_of(9, seed=3)
    tables = [9, 3, 30, 12, 40, 7], [5, 20, 1], [33, 2]

    first = served.forward([(a[:17], 0, tables[0][:3]), (b[:1], 0, tables[1][:1])])
    second = served.forward(
        [(b[1:13], 1, tables[1]), (a[17:18], 17, tables[0]), (c[:9], 0, tables[2])]
    )
    third = served.forward([(a[18:], 18, tables[0]), (b[13:], 13, tables[1])])

    logits_a = torch.cat((first[:17], second[12:13], third[:23]))
    logits_b = torch.cat((first[17:], second[:12], third[23:]))
    torch.testing.assert_close(logits_a, reference_logits(reference, a), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits_b, reference_logits(reference, b), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(second[13:], reference_logits(reference, c), atol=TOLERANCE, rtol=0)


def preferred(reference: Any, prompt: list[int], found: list[int]) -> list[int]:
    """The reference's most likely token behind the prompt, and behind each beginning of what was found.

    If it is what was found, that is the reference's greedy text: one pass tells, instead of one a token.
    """
    logits = reference_logits(reference, prompt + found[:-1])
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


def test_greedy_tokens_equal_the_reference(pair: tuple[Any, Served]) -> None:
    reference, served = pair
    prompt = prompt_of(12, seed=4)

    found = served.greedy(prompt, 32)

    assert found == preferred(reference, prompt, found)
