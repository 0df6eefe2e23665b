"""The one message of the tensor plane: a fixed header, then the tensors, then an opaque body.

Layout (little-endian, 128 bytes): magic 4s, version u16, header_len u16, kind u8, number of tensors u8,
flags u16, layer i32, threshold f32, took_ns u32, request_id 16s, epoch u64, seq u64, nbytes u64,
digest u64, four times (dtype u32, rows u32, cols u32), checksum u64. The payload holds each tensor
row-major, padded with zeros to 64 bytes, then the body. The checksum is xxh3-64 of the payload,
seeded with xxh3-64 of the header before it: it finds damage, not forgery.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from moesaic.errors import FrameError, InvalidInput

Message = bytearray

MAGIC = b"MOES"
VERSION = 1
HEADER_BYTES = 128
MAX_TENSORS = 4
MAX_ROWS = 16_384  # of a tensor, unless told otherwise
_HEADER = struct.Struct("<4sHHBBHifI16sQQQQ12I")  # all but the checksum
_CHECKSUM = struct.Struct("<Q")
_ALIGNMENT = 64  # of each tensor in the payload, for vector loads
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.int8)
_DTYPE_OF_CODE = dict(enumerate(_DTYPES, start=1))
CODE_OF_DTYPE = {dtype: code for code, dtype in _DTYPE_OF_CODE.items()}


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

    def encode(self) -> Message:
        """Write header and payload into one new buffer; each tensor is copied into it once.

        Raises:
            InvalidInput: a field does not fit its place, or a tensor is not 2-D of a supported dtype.
        """
        table = _table_of(self.tensors)
        payload: list[Any] = []
        nbytes = len(self.body)
        for tensor in self.tensors:
            padding = -tensor.nbytes % _ALIGNMENT
            payload += (_memory_of(tensor), bytes(padding))
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
    def decode(cls, message: Message, limits: FrameLimits) -> "Frame":
        """Read a received message; the tensors share its memory.

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
        tensors, body_start = _read_tensors(message, num_tensors, header[14:], limits)
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
        )

    def reply(
        self, tensors: list[Tensor], digest: int = 0, body: bytes = b"", flags: int = 0
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


def _read_tensors(
    message: Message, num_tensors: int, table: list[int], limits: FrameLimits
) -> tuple[list[Tensor], int]:
    if num_tensors > MAX_TENSORS:
        raise FrameError("num_tensors", f"at most {MAX_TENSORS}, got {num_tensors}")
    tensors = []
    start = HEADER_BYTES
    for idx in range(num_tensors):
        code, rows, cols = table[3 * idx : 3 * idx + 3]
        dtype = _DTYPE_OF_CODE.get(code)
        if dtype is None:
            raise FrameError(f"tensors[{idx}].dtype", f"unknown code {code}")
        if rows > limits.max_rows or cols > limits.max_cols:
            raise FrameError(
                f"tensors[{idx}].shape",
                f"at most {limits.max_rows} x {limits.max_cols}, got {rows} x {cols}",
            )
        end = start + rows * cols * dtype.itemsize
        if end > len(message):
            raise FrameError(f"tensors[{idx}]", f"ends at byte {end} of {len(message)}")
        tensors.append(
            torch.frombuffer(message, dtype=dtype, count=rows * cols, offset=start).view(rows, cols)
            if rows * cols
            else torch.empty(rows, cols, dtype=dtype)
        )
        start = _aligned(end)
    return tensors, start


def _table_of(tensors: list[Tensor]) -> list[int]:
    if len(tensors) > MAX_TENSORS:
        raise InvalidInput("tensors", f"a frame holds at most {MAX_TENSORS}, got {len(tensors)}")
    table = []
    for idx, tensor in enumerate(tensors):
        if tensor.dim() != 2 or tensor.dtype not in CODE_OF_DTYPE:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise InvalidInput(
                f"tensors[{idx}]", f"must be 2-D of f32, f16, bf16, i32, i64 or i8, got {found}"
            )
        table += [CODE_OF_DTYPE[tensor.dtype], *tensor.shape]
    return table + [0] * (3 * (MAX_TENSORS - len(tensors)))


def _memory_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Give the tensor's own memory, or a copy of it on the host; row-major."""
    if tensor.dtype is torch.bfloat16:  # numpy has no such type
        tensor = tensor.view(torch.int16)
    return tensor.contiguous().numpy(force=True)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _checksum(message: Message) -> int:
    view = memoryview(message)
    seed = xxhash.xxh3_64_intdigest(view[: _HEADER.size])
    return xxhash.xxh3_64_intdigest(view[HEADER_BYTES:], seed=seed)
