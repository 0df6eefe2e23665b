"""Who holds which KV block, and which are still found when nobody does."""

import pytest

from moesaic.engine.sequences.blocks import BlockPool, OutOfBlocks


def test_the_least_used_blocks_make_room_and_ends_go_before_beginnings() -> None:
    pool = BlockPool(4)
    old, new = pool.take(2), pool.take(2)
    for block, name in zip([*old, *new], [b"a", b"ab", b"c", b"cd"], strict=True):
        pool.publish(block, name)
    pool.give_back(old)
    pool.give_back(new)
    assert (pool.num_free, pool.num_cached) == (4, 4)

    assert pool.take(1) == [old[1]]
    assert pool.find([b"a", b"ab"]) == [old[0]]
    assert pool.take(1) == [old[0]]
    assert pool.find([b"a"]) == []
    assert pool.find([b"c", b"cd"]) == new


def test_blocks_are_given_out_once_and_taken_back_once() -> None:
    pool = BlockPool(2)
    blocks = pool.take(1)

    with pytest.raises(OutOfBlocks):
        pool.take(2)
    assert pool.num_free == 1
    pool.give_back(blocks)

    assert pool.num_free == 2
    with pytest.raises(KeyError):
        pool.give_back(blocks)
