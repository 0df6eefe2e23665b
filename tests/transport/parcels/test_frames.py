"""Frames whose first tensors travel apart, without any network."""

import hashlib

import pytest
import torch
import xxhash

from moesaic.errors import FrameError
from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.frame import HEADER_BYTES, Frame, FrameKind, FrameLimits
from moesaic.transport.tensor_table import NUMBERS

LIMITS = FrameLimits(max_rows=64, max_cols=64, max_bytes=1 << 14)
MEMORY = DeviceMemory(torch.device("cpu"))


def frame(num_parcels: int, rows: int = 4) -> Frame:
    return Frame(
        kind=FrameKind.REQUEST,
        request_id=bytes(range(16)),
        epoch=3,
        layer=5,
        seq=7,
        tensors=[torch.arange(rows * 8.0).view(rows, 8), torch.tensor([[1, 2]])],
        body=b"body",
        parcels=num_parcels,
        first_parcel=9,
    )


@pytest.mark.parametrize("num_parcels", [0, 1, 2])
def test_frames_sent_whole_have_the_bits_that_they_always_had(num_parcels: int) -> None:
    message = frame(num_parcels).encode()

    # Computed by the code before there were parcels.
    assert (
        hashlib.sha256(message).hexdigest()
        == "12f8dbb0d3d32cc3ea291400be9f4d9229081568a492be3aa9279342ca5fe4ed"
    )
    assert Frame.decode(message, LIMITS).parcels == 0


def test_parcels_are_described_but_not_carried() -> None:
    message = frame(1).encode(apart=True)

    decoded = Frame.decode(message, LIMITS, MEMORY)

    assert len(message) == HEADER_BYTES + 64 + 4  # the second tensor, padded, and the body
    assert (decoded.parcels, decoded.first_parcel, decoded.body) == (1, 9, b"body")
    assert decoded.tensors[0].shape == (4, 8)
    assert decoded.tensors[0].dtype == torch.float32
    assert decoded.tensors[1].tolist() == [[1, 2]]


def test_parcels_are_refused_where_none_were_agreed_on() -> None:
    with pytest.raises(FrameError, match="agreed"):
        Frame.decode(frame(1).encode(apart=True), LIMITS)


@pytest.mark.parametrize("code", [1 | 1 << 8 | 8 << 12, 1 | 1 << 8 | 11 << 12])
def test_parcels_that_are_not_numbered_in_a_row_are_refused(code: int) -> None:
    message = resealed(frame(2).encode(apart=True), 84, (code).to_bytes(4, "little"))

    with pytest.raises(FrameError, match="consecutive numbers"):
        Frame.decode(message, LIMITS, MEMORY)


def test_numbers_of_parcels_begin_again_within_a_frame() -> None:
    sent = frame(2)
    sent.first_parcel = NUMBERS - 1

    decoded = Frame.decode(sent.encode(apart=True), LIMITS, MEMORY)

    assert (decoded.parcels, decoded.first_parcel) == (2, NUMBERS - 1)


def test_a_tensor_within_the_frame_before_a_parcel_is_refused() -> None:
    message = resealed(frame(2).encode(apart=True), 72, (1).to_bytes(4, "little"))

    with pytest.raises(FrameError, match="must be the first"):
        Frame.decode(message, LIMITS, MEMORY)


@pytest.mark.parametrize(("at", "size"), [(76, 65), (80, 65)])
def test_parcels_out_of_bounds_are_refused_before_memory_is_taken(
    at: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MEMORY, "take", pytest.fail)
    message = resealed(frame(1).encode(apart=True), at, size.to_bytes(4, "little"))

    with pytest.raises(FrameError, match="at most 64 x 64"):
        Frame.decode(message, LIMITS, MEMORY)


def test_parcels_count_among_the_bytes_of_their_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORY, "take", pytest.fail)
    message = resealed(frame(1).encode(apart=True), 76, (64).to_bytes(4, "little"))
    tight = FrameLimits(64, 64, len(message) + 64 * 8 * 4 - 1)

    with pytest.raises(FrameError, match="in all"):
        Frame.decode(message, tight, MEMORY)


@pytest.mark.parametrize("at", [72, 73, 74, 76])
def test_a_damaged_description_of_parcels_is_found(at: int) -> None:
    message = frame(1).encode(apart=True)
    message[at] ^= 4

    with pytest.raises(FrameError, match="damaged"):
        Frame.decode(message, LIMITS, MEMORY)


def resealed(message: bytearray, at: int, changed: bytes) -> bytearray:
    """Change a field as a peer would that means it."""
    message[at : at + len(changed)] = changed
    seed = xxhash.xxh3_64_intdigest(message[: HEADER_BYTES - 8])
    whole = xxhash.xxh3_64_intdigest(message[HEADER_BYTES:], seed=seed)
    message[HEADER_BYTES - 8 : HEADER_BYTES] = whole.to_bytes(8, "little")
    return message
