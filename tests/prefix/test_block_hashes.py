"""Names of blocks: equal for equal beginnings under one root, different for anything else."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from moesaic.prefix.blocks import HASH_BYTES, BlockHasher

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
HASHER = BlockHasher(b"key", "model", 16)


def names_of(tokens: list[int], hasher: BlockHasher = HASHER, **root: str | bool) -> list[bytes]:
    names: list[bytes] = []
    hasher.extend(names, hasher.root(**root), tokens)  # type: ignore[arg-type]
    return names


@given(TOKENS, TOKENS)
def test_prompts_share_as_many_names_as_they_share_full_blocks(
    one: list[int], other: list[int]
) -> None:
    first, second = names_of(one), names_of(other)
    pairs = zip(first, second, strict=False)

    assert len(first) == len(one) // 16
    for i, (a, b) in enumerate(pairs, start=1):
        assert (a == b) == (one[: 16 * i] == other[: 16 * i])


@given(TOKENS, st.integers(0, 70))
def test_names_do_not_depend_on_how_a_prompt_came_in(tokens: list[int], cut: int) -> None:
    names: list[bytes] = []
    HASHER.extend(names, HASHER.root(), tokens[:cut])
    HASHER.extend(names, HASHER.root(), tokens)

    assert names == names_of(tokens)
    assert all(len(name) == HASH_BYTES for name in names)


def test_whatever_parts_two_prompts_parts_all_their_names() -> None:
    tokens = [7] * 40
    apart = [
        names_of(tokens),
        names_of(tokens, salt="a"),
        names_of(tokens, salt="b"),
        names_of(tokens, BlockHasher(b"another key", "model", 16)),
        names_of(tokens, BlockHasher(b"key", "another model", 16)),
        names_of([7] * 80)[2:],
    ]

    names = [name for some in apart for name in some]
    assert len(set(names)) == len(names)


def test_another_process_gives_the_same_names() -> None:
    program = (
        "from moesaic.prefix.blocks import BlockHasher as B; h = B(b'key', 'model', 16);"
        "n = []; h.extend(n, h.root('salt'), range(32)); print(n[-1].hex())"
    )

    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert told.stdout.strip() == names_of(list(range(32)), salt="salt")[-1].hex()
