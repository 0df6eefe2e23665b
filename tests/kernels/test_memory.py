"""What lies in huge pages is a tensor like any other, and its memory comes back."""

import gc
import threading

import pytest
import torch

from moesaic.native.memory import SLAB_BYTES, SMALL_BYTES, HugePages

MIDDLING = (SMALL_BYTES // 4, 3)


@pytest.mark.parametrize("shape", [(3, 5), MIDDLING, (SLAB_BYTES // 4, 2)])
def test_it_is_zeros_wherever_it_lies(shape: tuple[int, int]) -> None:
    tensor = HugePages().zeros(shape, torch.float32)

    assert torch.equal(tensor, torch.zeros(shape))
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    tensor += 1
    assert tensor.sum() == tensor.numel()


def test_a_view_keeps_its_memory() -> None:
    memory = HugePages()
    view = memory.zeros(MIDDLING, torch.float32)[5:, 1]
    view.fill_(7)
    gc.collect()

    others = [memory.zeros(MIDDLING, torch.float32).fill_(1) for _ in range(20)]

    assert (view == 7).all()
    assert len({tensor.data_ptr() for tensor in others}) == len(others)


def test_what_is_let_go_is_handed_out_again_as_zeros() -> None:
    memory = HugePages()
    kept = memory.zeros(MIDDLING, torch.float32)
    first = memory.zeros(MIDDLING, torch.float32).fill_(3)
    address = first.data_ptr()
    del first

    again = memory.zeros(MIDDLING, torch.float32)

    assert again.data_ptr() == address
    assert not again.any()
    assert not kept.any()


def test_a_slab_that_nobody_uses_goes_back_to_the_system() -> None:
    memory = HugePages()
    tensors = [memory.zeros((SLAB_BYTES // 16, 1), torch.float32) for _ in range(10)]
    assert memory.nbytes > 2 * SLAB_BYTES

    del tensors

    assert memory.nbytes == 0


def test_many_threads_get_memory_of_their_own() -> None:
    memory, wrong = HugePages(), []

    def work(number: int) -> None:
        for _ in range(200):
            tensor = memory.zeros(MIDDLING, torch.float32)
            if tensor.any():
                wrong.append(number)
            tensor.fill_(number)
            if not (tensor == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert memory.nbytes == 0
