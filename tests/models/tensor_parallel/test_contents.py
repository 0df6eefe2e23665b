"""What ranks send each other arrives, whatever the shape, the stride and the number of elements."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moesaic.kernels.decoder_step import Rotation
from moesaic.kernels.paged_rows import PagedRows
from moesaic.models.layers.attention_plan import AttentionPlan
from moesaic.models.tensor_parallel.contents import as_bytes, from_bytes
from moesaic.models.tensor_parallel.plans import decode_plan, encode_plan

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None, dims: int | None = None) -> Tensor:
    """A view of a larger tensor: any shape, and gaps, repeats or turned axes in memory."""
    chosen = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    ndim = draw(st.integers(0, 3)) if dims is None else dims
    sizes = draw(st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim))
    strides = draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim))
    offset = draw(st.integers(0, 3))
    last = offset + sum(max(0, size - 1) * by for size, by in zip(sizes, strides, strict=True))
    return (torch.arange(last + 1) % 97).to(chosen).as_strided(sizes, strides, offset)


@given(tensor=tensors())
def test_bytes_of_any_tensor_give_it_back(tensor: Tensor) -> None:
    content = as_bytes(tensor)

    assert content.shape == (tensor.nbytes,)
    assert torch.equal(from_bytes(content, tensor.dtype, tuple(tensor.shape)), tensor)


@given(data=st.data())
def test_a_plan_of_any_tensors_arrives(data: st.DataObject) -> None:
    def ints(dims: int) -> Tensor:
        return data.draw(tensors(torch.int64, dims))

    rows = PagedRows(ints(1), ints(1), ints(1), ints(2), 3, 4)
    attending = data.draw(st.none() | tensors(torch.int64, 1))
    plan = AttentionPlan(ints(1), (rows,), 16, attending)
    rotation = Rotation(
        data.draw(tensors(torch.float32, 2)), data.draw(tensors(torch.float32, 2)), True
    )

    found, turned = decode_plan(encode_plan(plan, rotation), CPU)

    def same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)

    assert same(found.write_offsets, plan.write_offsets)
    for name in ("first_rows", "num_rows", "lengths", "block_tables", "max_rows", "max_length"):
        assert same(getattr(found.groups[0], name), getattr(rows, name))
    assert same(found.attending, attending)
    assert same(turned.cos, rotation.cos)
    assert same(turned.sin, rotation.sin)


@pytest.mark.parametrize("stride", [1, 2, 7])
def test_one_element_with_any_stride_has_its_bytes(stride: int) -> None:
    one = torch.arange(8).as_strided((1,), (stride,), 5)

    assert as_bytes(one).tolist() == [5, 0, 0, 0, 0, 0, 0, 0]
