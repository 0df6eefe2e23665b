"""Memory for weights: parts that nobody uses go back to the system when it is asked for."""

import torch

from moesaic.native.memory import HugePages
from moesaic.telemetry.memory import own_bytes

SIZE = 192 << 10  # of an expert of the demo model
NUM = 160  # two slabs


def test_parts_among_others_are_given_back_and_others_stay_as_they_are() -> None:
    pages = HugePages()
    parts = [pages.zeros((SIZE,), torch.uint8).fill_(n % 251) for n in range(NUM)]
    full_bytes = own_bytes()
    del parts[::2]

    pages.trim()

    assert full_bytes - own_bytes() > 0.9 * NUM / 2 * SIZE
    assert all((part == (2 * n + 1) % 251).all() for n, part in enumerate(parts))
    again = pages.zeros((SIZE,), torch.uint8)
    assert not again.any()
