"""Tensors that travel apart between the GPU's memory of two processes."""

import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.tensor_table import CODE_OF_DTYPE
from moesaic.transport.ucx.network import UcxNetwork
from tests.transport.conftest import LIMITS, SECRET
from tests.transport.linked import HANG_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

Start = Callable[[str], Any]


@pytest.fixture
async def near() -> AsyncIterator[UcxNetwork]:
    made = UcxNetwork("near", "attention", SECRET, LIMITS, device=torch.device("cuda", 0))
    yield made
    await made.close()


def request(rows: torch.Tensor, seq: int = 1) -> Frame:
    return Frame(
        kind=FrameKind.REQUEST, request_id=os.urandom(16), seq=seq, tensors=[rows], parcels=1
    )


@pytest.mark.parametrize("dtype", list(CODE_OF_DTYPE))
@pytest.mark.parametrize("shape", [(1, 64), (16, 4096), (4096, 4096)])
async def test_tensors_go_and_come_back(
    near: UcxNetwork, far_worker: Start, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    link: Any = await near.connect(far_worker("auto/cuda").address, "far", HANG_S)
    rows = torch.randint(-100, 100, shape, device="cuda").to(dtype)

    [reply] = await near.exchange([(link, request(rows))], HANG_S)

    assert link.memory is not None
    assert isinstance(reply, Frame)
    assert reply.tensors[0].is_cuda
    assert torch.equal(reply.tensors[0], rows)


async def test_what_kernels_are_still_writing_is_sent_once_they_have(
    near: UcxNetwork, far_worker: Start
) -> None:
    link: Any = await near.connect(far_worker("auto/cuda").address, "far", HANG_S)
    for seq in range(20):
        rows = torch.zeros(512, 4096, device="cuda")
        torch.cuda._sleep(20_000_000)
        rows += seq

        [reply] = await near.exchange([(link, request(rows, seq))], HANG_S)

        assert isinstance(reply, Frame)
        assert bool((reply.tensors[0] == seq).all())


async def test_nothing_arrives_in_memory_that_kernels_still_use(
    near: UcxNetwork, far_worker: Start
) -> None:
    link: Any = await near.connect(far_worker("auto/cuda").address, "far", HANG_S)
    read = []
    for seq in range(50):
        sent = torch.full((512, 4096), float(seq), device="cuda")
        [reply] = await near.exchange([(link, request(sent, seq))], HANG_S)
        assert isinstance(reply, Frame)
        torch.cuda._sleep(20_000_000)
        read.append(reply.tensors[0].sum())  # late; the memory is given back before
        del reply

    for seq, each in enumerate(read):
        assert float(each) == seq * 512 * 4096
