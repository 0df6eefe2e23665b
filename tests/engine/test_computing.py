"""Parts of a step have its rows, evenly divided."""

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moesaic.engine.computing import split_evenly
from moesaic.engine.sequences.sequence import Chunk


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_even_parts_have_all_rows_once_and_want_what_the_step_wants(
    shapes: list[tuple[int, int]], count: int
) -> None:
    owner: Any = None
    rows, chunks = itertools.count(), []
    for num, wanted in shapes:
        tokens = list(itertools.islice(rows, num))
        chunks.append(Chunk(owner, tokens, tokens[0] * 2, [num], wanted=min(num, wanted)))
    count = min(count, sum(num for num, _ in shapes))

    parts = split_evenly(chunks, count)

    sizes = [sum(len(chunk.token_ids) for chunk in part) for part in parts]
    assert len(parts) == count
    assert max(sizes) - min(sizes) <= 1
    assert _row_by_row([c for part in parts for c in part]) == _row_by_row(chunks)
    assert all(c.token_ids for part in parts for c in part)


def _row_by_row(chunks: list[Chunk]) -> list[tuple[int, int, list[int], bool]]:
    """Token, position, blocks of every row, and whether its logits are wanted."""
    return [
        (token, chunk.start + i, chunk.block_table, i >= len(chunk.token_ids) - chunk.wanted)
        for chunk in chunks
        for i, token in enumerate(chunk.token_ids)
    ]
