"""Experts that rows choose at random, beside the count of all choices."""

import itertools

import pytest

from moesaic.costs import RandomChoice


@pytest.mark.parametrize("num_experts", [1, 3, 4])
@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_it_is_the_mean_over_all_choices(num_experts: int, rows: int) -> None:
    for top_k in range(1, num_experts + 1):
        choices = list(itertools.combinations(range(num_experts), top_k))
        batches = list(itertools.product(choices, repeat=rows))
        mean = sum(len(set().union(*batch)) for batch in batches) / len(batches)

        assert RandomChoice(num_experts, top_k).experts(rows) == pytest.approx(mean)
