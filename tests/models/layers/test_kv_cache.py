"""The KV cache takes memory as it is used."""

import mmap
from pathlib import Path

import torch

from moesaic.models.configuration.config import load_config
from moesaic.models.layers.kv_cache import KVCache
from tests.suites import DEMO

CONFIG = load_config(DEMO)
WIDTH = CONFIG.kv_width
BLOCKS = 10**9 // (CONFIG.num_layers * WIDTH * 4 * 16)  # a gigabyte of float32


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE


def test_blocks_take_memory_when_they_are_written_to() -> None:
    before = resident_bytes()

    cache = KVCache(CONFIG, num_blocks=BLOCKS)

    assert cache.nbytes > 800 * 10**6
    assert resident_bytes() - before < 100 << 20
    rows = cache.rows(3)
    assert rows.shape == (BLOCKS * 16, WIDTH)
    assert not rows[-1].any()  # zeros, as they would be made by torch
    rows[5:7] = 1.0
    cache.copy_blocks([(0, 7)])
    assert cache.rows(3)[7 * 16 + 5 : 7 * 16 + 7].eq(1.0).all()
    assert not cache.rows(2).data_ptr() % 64


def test_any_type_of_numbers_is_held() -> None:
    rows = KVCache(CONFIG, 4, dtype=torch.bfloat16).rows(0)
    rows[3] = 2.5

    assert rows.dtype is torch.bfloat16
    assert float(rows.sum()) == 2.5 * WIDTH
