from typing import Any

import numpy as np
import pytest

from moesaic.dispatch.collaborative.file_cache import FileCache
from moesaic.errors import CheckpointError
from moesaic.experts.loaded import LoadedExpert


class Files:
    """Experts on a disk that counts what is read."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def bring(self, layer: int, expert: int) -> LoadedExpert:
        if expert == 9:
            raise CheckpointError("model.safetensors", "is damaged")
        self.read.append((layer, expert))
        made: Any = f"{layer}/{expert}"
        return LoadedExpert(made)


def opened(capacity: int) -> tuple[FileCache, Files]:
    files = Files()
    return FileCache(files.bring, [0, 1], 10, capacity), files


async def test_what_was_read_is_kept_while_there_is_room() -> None:
    cache, files = opened(2)

    first = await cache.get(0, [1, 2])
    again = await cache.get(0, [2, 1])

    assert files.read == [(0, 1), (0, 2)]
    assert again == first[::-1]
    assert cache.load_s > 0


async def test_what_is_wanted_more_stays_and_a_passing_prompt_washes_nothing_out() -> None:
    cache, files = opened(2)
    cache.note(0, np.array([[1, 2]] * 20, np.int32))
    await cache.get(0, [1, 2])
    for expert in (3, 4, 5):
        cache.note(0, np.array([[expert]], np.int32))
        await cache.get(0, [expert])

    await cache.get(0, [1, 2])

    assert files.read == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]


async def test_what_comes_to_be_wanted_more_takes_the_place_of_the_least() -> None:
    cache, files = opened(2)
    cache.note(0, np.array([[1, 2]] * 20, np.int32))
    await cache.get(0, [1, 2])
    cache.note(1, np.array([[7]] * 30, np.int32))
    cache.note(0, np.array([[1]], np.int32))

    await cache.get(1, [7])
    await cache.get(1, [7])

    assert files.read[-1] == (1, 7)
    assert (0, 2) not in cache
    assert (0, 1) in cache


async def test_less_room_leaves_what_is_wanted_most_and_slots_need_no_copy() -> None:
    cache, _ = opened(4)
    cache.note(0, np.array([[1, 2, 3, 3]], np.int32))
    await cache.get(0, [1, 2, 3])

    cache.resize(1)
    assert [(0, 3) in cache, cache.num_held] == [True, 1]

    cache.drop([(0, 3)])
    assert cache.num_held == 0


async def test_a_damaged_file_is_told_and_nothing_of_it_kept() -> None:
    cache, _ = opened(4)

    with pytest.raises(CheckpointError):
        await cache.get(0, [9])

    assert cache.num_held == 0
