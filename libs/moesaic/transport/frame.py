"""The one message of the tensor plane: a fixed header, then the tensors, then an opaque body.

Layout of the header, 128 bytes, little-endian::

    magic 4s, version u16, header_len u16, kind u8, number of tensors u8, flags u16, layer i32,
    threshold f32, took_ns u32, request_id 16s, epoch u64, seq u64, nbytes u64, digest u64,
    four times (dtype u32, rows u32, cols u32), checksum u64

The payload holds each tensor row-major, padded with zeros to 64 bytes, then the body. The checksum is
xxh3-64 of the payload, seeded with xxh3-64 of the header before it: it finds damage, not forgery.

The first tensors of a frame may be parcels: they are not in the payload but travel apart, from device
memory to device memory. Bit 8 of the dtype marks them, and bits 12 to 31 number them. No checksum of ours
covers their bytes, for they never come to the host. Networks and buses have checksums of their own, mapped
memory has none.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import xxhash
from torch import Tensor

from moesaic.errors import FrameError, InvalidInput
from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.tensor_table import (
    memory_of,
    padding_of,
    parcels_of,
    read_table,
    read_tensors,
    table_of,
)

Message = bytearray

MAGIC = b"MOES"
VERSION = 1
HEADER_BYTES = 128
MAX_ROWS = 16_384  # of a tensor, unless told otherwise
_HEADER = struct.Struct("<4sHHBBHifI16sQQQQ12I")  # all but the checksum
_CHECKSUM = struct.Struct("<Q")


class FrameKind(IntEnum):
    """The purpose of a frame."""

    REQUEST = 1
    REPLY = 2
    ERROR = 3
    PING = 4
    PONG = 5
    NOTE = 6  # a request without an answer
    HELLO = 16  # the handshake, in this order
    CHALLENGE = 17
    PROOF = 18
    WELCOME = 19
    OFFER = 20
    ACCEPT = 21


_KIND_OF_CODE = {kind.value: kind for kind in FrameKind}


@dataclass(frozen=True)
class FrameLimits:
    """Bounds of the frames that a receiver accepts; memory for a larger one is never allocated."""

    max_rows: int
    max_cols: int
    max_bytes: int  # header and payload

    @classmethod
    def of_hidden_size(cls, hidden_size: int, max_rows: int = MAX_ROWS) -> "FrameLimits":
        """Make limits for fp32 hidden states ``[max_rows, hidden_size]`` and two routing tables of up to 64 choices."""
        # Rows of bytes have their scale behind them; a list of workers is one row, however small the model.
        max_cols = max(hidden_size + 4, 4096)
        return cls(max_rows, max_cols, max_rows * 4 * (hidden_size + 128) + (1 << 16))


@dataclass(kw_only=True, slots=True, eq=False)
class Frame:
    """One message with up to four tensors ``[rows, cols]``.

    A reply repeats ``request_id``, ``seq``, ``epoch`` and ``layer`` of its request. The meaning of
    ``flags``, ``digest`` and ``body`` is the two ends' agreement; an ERROR carries its cause in
    ``body``.

    Attributes:
        parcels: number of first tensors that travel apart, if the link can; they are contiguous.
        first_parcel: the number of the first of them on its connection.
        settled: the device has computed them already, so nobody waits for it before they are sent.
    """

    kind: FrameKind
    request_id: bytes = bytes(16)  # of the step
    epoch: int = 0
    layer: int = 0
    seq: int = 0
    threshold: float = 1.0
    took_ns: int = 0  # of a reply: what computing it took; 0: unknown
    flags: int = 0
    digest: int = 0
    tensors: list[Tensor] = field(default_factory=list)
    body: bytes = b""
    parcels: int = 0
    first_parcel: int = 0
    settled: bool = False

    def encode(self, *, apart: bool = False) -> Message:
        """Write header and payload into one new buffer; each tensor is copied into it once.

        Args:
            apart: leave the parcels out; otherwise they are tensors like the others.

        Raises:
            InvalidInput: a field does not fit its place, or a tensor is not 2-D of a supported dtype.
        """
        parcels = self.parcels if apart else 0
        table = table_of(self.tensors, parcels, self.first_parcel)
        payload: list[Any] = []
        nbytes = len(self.body)
        for tensor in self.tensors[parcels:]:
            padding = padding_of(tensor.nbytes)
            payload += (memory_of(tensor), bytes(padding))
            nbytes += tensor.nbytes + padding
        if len(self.request_id) != 16:
            raise InvalidInput("request_id", f"must be 16 bytes, got {len(self.request_id)}")
        start = (MAGIC, VERSION, HEADER_BYTES, self.kind, len(self.tensors), self.flags, self.layer)
        rest = (self.threshold, self.took_ns, self.request_id, self.epoch, self.seq)
        try:
            header = _HEADER.pack(*start, *rest, nbytes, self.digest, *table)
        except (struct.error, OverflowError) as error:
            raise InvalidInput("frame", f"a header field does not fit: {error}") from error
        message = bytearray().join((header, bytes(_CHECKSUM.size), *payload, self.body))
        _CHECKSUM.pack_into(message, _HEADER.size, _checksum(message))
        return message

    @classmethod
    def decode(
        cls, message: Message, limits: FrameLimits, memory: DeviceMemory | None = None
    ) -> "Frame":
        """Read a received message; the tensors share its memory, except parcels.

        These get ``memory``, which they still have to be received into; ``None``: there can be none.
        It is taken once all else is found right, and within ``limits``.

        Raises:
            FrameError: a field has a value that no sender of ours writes, or the message is damaged or too large.
        """
        header = _read_header(message, limits)
        kind, num_tensors, flags, layer, threshold, took_ns = header[3:9]
        request_id, epoch, seq, nbytes, digest = header[9:14]
        if nbytes != len(message) - HEADER_BYTES:
            raise FrameError("nbytes", f"says {nbytes}, {len(message) - HEADER_BYTES} came")
        if _CHECKSUM.unpack_from(message, _HEADER.size)[0] != _checksum(message):
            raise FrameError("checksum", "the message is damaged")
        if not 0.0 <= threshold <= 1.0:
            raise FrameError("threshold", f"must be in 0..1, got {threshold}")
        entries = read_table(num_tensors, header[14:], limits.max_rows, limits.max_cols)
        parcels, first_parcel = parcels_of(entries)
        if parcels and memory is None:
            raise FrameError("tensors", "travel outside the frame, which was not agreed on")
        whole = len(message) + sum(entry.nbytes for entry in entries[:parcels])
        if whole > limits.max_bytes:
            raise FrameError("tensors", f"at most {limits.max_bytes} bytes in all, got {whole}")
        tensors, body_start = read_tensors(message, HEADER_BYTES, entries[parcels:])
        if parcels and memory is not None:
            apart = [memory.take(each.rows, each.cols, each.dtype) for each in entries[:parcels]]
            tensors = apart + tensors
        return cls(
            kind=kind,
            request_id=request_id,
            epoch=epoch,
            layer=layer,
            seq=seq,
            threshold=threshold,
            took_ns=took_ns,
            flags=flags,
            digest=digest,
            tensors=tensors,
            body=bytes(message[body_start:]),
            parcels=parcels,
            first_parcel=first_parcel,
        )

    def reply(
        self,
        tensors: list[Tensor],
        digest: int = 0,
        body: bytes = b"",
        flags: int = 0,
        parcels: int = 0,
        settled: bool = False,
    ) -> "Frame":
        """Make the REPLY to this request."""
        return Frame(
            kind=FrameKind.REPLY,
            request_id=self.request_id,
            epoch=self.epoch,
            layer=self.layer,
            seq=self.seq,
            flags=flags,
            digest=digest,
            tensors=tensors,
            body=body,
            parcels=parcels,
            settled=settled,
        )

    def answers(self, request: "Frame") -> str | None:
        """Name the first field in which this reply does not match ``request``; None if all match."""
        for name in ("request_id", "seq", "epoch", "layer"):
            if getattr(self, name) != getattr(request, name):
                return name
        return None


def payload_bytes(header: Message, limits: FrameLimits) -> int:
    """Read from a header ``uint8[128]`` the number of bytes that follow it, for streams.

    Raises:
        FrameError: it is no header of ours, or announces more than ``limits`` allow.
    """
    return int(_read_header(header, limits)[12])


def _read_header(message: Message, limits: FrameLimits) -> list[Any]:
    if len(message) < HEADER_BYTES:
        raise FrameError("header", f"needs {HEADER_BYTES} bytes, got {len(message)}")
    header = list(_HEADER.unpack_from(message))
    magic, version, header_len, kind, nbytes = *header[:4], header[12]
    if magic != MAGIC:
        raise FrameError("magic", f"expected {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise FrameError("version", f"this side speaks {VERSION}, got {version}")
    if header_len != HEADER_BYTES:
        raise FrameError("header_len", f"must be {HEADER_BYTES}, got {header_len}")
    if HEADER_BYTES + nbytes > limits.max_bytes:
        raise FrameError(
            "nbytes", f"at most {limits.max_bytes - HEADER_BYTES} are allowed, got {nbytes}"
        )
    if kind not in _KIND_OF_CODE:
        raise FrameError("kind", f"unknown kind {kind}")
    header[3] = _KIND_OF_CODE[kind]
    return header


def _checksum(message: Message) -> int:
    view = memoryview(message)
    seed = xxhash.xxh3_64_intdigest(view[: _HEADER.size])
    return xxhash.xxh3_64_intdigest(view[HEADER_BYTES:], seed=seed)
