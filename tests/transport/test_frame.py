import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import FrameError, InvalidInput
from moesaic.transport.frame import HEADER_BYTES, Frame, FrameKind, FrameLimits, payload_bytes

LIMITS = FrameLimits(max_rows=64, max_cols=64, max_bytes=1 << 20)
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    rows, cols = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    values = torch.randint(-128, 128, (cols, rows) if draw(st.booleans()) else (rows, cols))
    return values.to(draw(st.sampled_from(DTYPES))).reshape(cols, rows).T


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    return Frame(
        kind=draw(st.sampled_from(FrameKind)),
        request_id=draw(st.binary(min_size=16, max_size=16)),
        epoch=draw(st.integers(0, 2**64 - 1)),
        layer=draw(st.integers(-(2**31), 2**31 - 1)),
        seq=draw(st.integers(0, 2**64 - 1)),
        threshold=draw(st.floats(0, 1, width=32)),
        flags=draw(st.integers(0, 2**16 - 1)),
        digest=draw(st.integers(0, 2**64 - 1)),
        tensors=draw(st.lists(tensors(), max_size=4)),
        body=draw(st.binary(max_size=40)),
    )


FIELDS = ("kind", "request_id", "epoch", "layer", "seq", "threshold", "flags", "digest", "body")


@given(frames())
def test_a_decoded_frame_equals_the_encoded_one(frame: Frame) -> None:
    decoded = Frame.decode(frame.encode(), LIMITS)

    assert [getattr(decoded, name) for name in FIELDS] == [getattr(frame, name) for name in FIELDS]
    assert len(decoded.tensors) == len(frame.tensors)
    for got, sent in zip(decoded.tensors, frame.tensors, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


@given(frames(), st.data())
def test_a_truncated_frame_is_refused(frame: Frame, data: st.DataObject) -> None:
    message = frame.encode()
    cut = message[: data.draw(st.integers(0, len(message) - 1))]

    with pytest.raises(FrameError):
        Frame.decode(cut, LIMITS)


@settings(max_examples=300)
@given(frames(), st.data())
def test_one_flipped_bit_is_never_accepted(frame: Frame, data: st.DataObject) -> None:
    message = frame.encode()
    bit = data.draw(st.integers(0, 8 * len(message) - 1))
    message[bit // 8] ^= 1 << bit % 8

    with pytest.raises(FrameError):
        Frame.decode(message, LIMITS)


@given(st.binary(max_size=400))
def test_foreign_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(FrameError):
        Frame.decode(bytearray(noise), LIMITS)


def test_decoded_tensors_share_the_memory_of_the_message() -> None:
    message = Frame(kind=FrameKind.REQUEST, tensors=[torch.ones(4, 8)]).encode()

    hidden = Frame.decode(message, LIMITS).tensors[0]

    assert hidden.data_ptr() == np.frombuffer(message, np.uint8).ctypes.data + HEADER_BYTES


def test_padding_never_carries_old_memory() -> None:
    message = Frame(kind=FrameKind.REQUEST, tensors=[torch.ones(1, 1)] * 2).encode()

    assert not any(message[HEADER_BYTES + 4 : HEADER_BYTES + 64])
    assert not any(message[HEADER_BYTES + 68 :])


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (Frame(kind=FrameKind.REPLY, tensors=[torch.zeros(65, 1)]), "tensors[0].shape"),
        (Frame(kind=FrameKind.REPLY, tensors=[torch.zeros(1, 65)]), "tensors[0].shape"),
        (Frame(kind=FrameKind.REPLY, threshold=1.5), "threshold"),
        (Frame(kind=FrameKind.REPLY, threshold=float("nan")), "threshold"),
        (Frame(kind=FrameKind.REPLY, body=bytes(1 << 20)), "nbytes"),
    ],
)
def test_a_frame_beyond_the_limits_is_refused_by_field(frame: Frame, field: str) -> None:
    with pytest.raises(FrameError) as caught:
        Frame.decode(frame.encode(), LIMITS)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("offset", "layout", "value", "field"),
    [
        (0, "<4s", b"HTTP", "magic"),
        (4, "<H", 2, "version"),
        (6, "<H", 64, "header_len"),
        (8, "<B", 99, "kind"),
        (56, "<Q", 2**63, "nbytes"),
        (120, "<Q", 7, "checksum"),
    ],
)
def test_a_wrong_header_field_is_named(offset: int, layout: str, value: object, field: str) -> None:
    message = Frame(kind=FrameKind.REQUEST).encode()
    struct.pack_into(layout, message, offset, value)

    with pytest.raises(FrameError) as caught:
        Frame.decode(message, LIMITS)

    assert caught.value.field == field


def test_a_header_tells_the_length_of_what_follows() -> None:
    message = Frame(kind=FrameKind.OFFER, body=b"12345").encode()

    assert payload_bytes(message[:HEADER_BYTES], LIMITS) == 5


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"tensors": [torch.zeros(3)]}, "tensors[0]"),
        ({"tensors": [torch.zeros(1, 1, dtype=torch.float64)]}, "tensors[0]"),
        ({"tensors": [torch.zeros(1, 1)] * 5}, "tensors"),
        ({"request_id": b"short"}, "request_id"),
        ({"epoch": -1}, "frame"),
        ({"flags": 1 << 16}, "frame"),
    ],
)
def test_what_does_not_fit_is_not_encoded(fields: dict[str, object], wrong: str) -> None:
    frame = Frame(kind=FrameKind.REQUEST, **fields)  # type: ignore[arg-type]

    with pytest.raises(InvalidInput) as caught:
        frame.encode()

    assert caught.value.field == wrong


@pytest.mark.parametrize("name", ["request_id", "seq", "epoch", "layer"])
def test_an_answer_to_another_request_is_recognised(name: str) -> None:
    request = Frame(kind=FrameKind.REQUEST, request_id=os.urandom(16), seq=3, epoch=4, layer=5)
    identity = {n: getattr(request, n) for n in ("request_id", "seq", "epoch", "layer")}
    foreign = identity | {name: bytes(16) if name == "request_id" else 99}

    assert Frame(kind=FrameKind.REPLY, **identity).answers(request) is None
    assert Frame(kind=FrameKind.REPLY, **foreign).answers(request) == name
