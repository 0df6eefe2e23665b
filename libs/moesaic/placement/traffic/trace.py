"""Traces of routing: the experts that every row of every step chose, and nothing else.

A trace file has three parts, in this order:

* 8 bytes ``MOETRACE``, then version (u16) and length of the header (u32), little-endian.
* The header, JSON: model digest, experts, top-k, decoder layers, names of the parts, numbers of steps
  and rows.
* One xz stream with its own checksum. It has the parts (u16), rows (u32) and decode rows (u32) of all
  steps, then the ids. An id takes one byte up to 256 experts, else two. Ids are ordered by layer, then
  by place in the top-k, then by step and row.

Everything is checked against the header before memory is taken for it.
"""

import lzma
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from moesaic.errors import InvalidInput

MAGIC = b"MOETRACE"
VERSION = 1
MAX_BYTES = 1 << 30  # of a trace, unpacked
MAX_EXPERTS = 1 << 16
_HEAD = struct.Struct("<8sHI")
_MAX_HEADER_BYTES = 1 << 20
_UNPACK_MEMORY_BYTES = 1 << 27
_PER_STEP = np.dtype([("part", "<u2"), ("rows", "<u4"), ("decode_rows", "<u4")])

Phase = Literal["prefill", "decode", "mixed"]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPERTS)]


class _Header(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model_digest: str
    num_experts: Positive
    top_k: Positive
    layers: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    parts: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1 << 16)]
    steps: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
    rows: Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


@dataclass(frozen=True)
class TracedStep:
    """One forward pass: a dispatch batch in each layer."""

    part: int  # index into the trace's parts
    decode_rows: int  # rows of sequences that had one row in it
    topk_ids: NDArray[Any]  # uint8 or uint16 [L, T, k], heaviest first

    @property
    def phase(self) -> Phase:
        """``decode`` if every sequence had one row, ``prefill`` if none had."""
        if self.decode_rows == self.topk_ids.shape[1]:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"


@dataclass(frozen=True)
class Trace:
    """Steps of one model, in the order in which they ran, part by part."""

    model_digest: str
    num_experts: int
    top_k: int
    layers: tuple[int, ...]  # decoder layers
    parts: tuple[str, ...]  # names, of task sets for example
    steps: tuple[TracedStep, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all steps."""
        return sum(step.topk_ids.shape[1] for step in self.steps)

    def selected(
        self, parts: Iterable[str] | None = None, phases: Iterable[Phase] | None = None
    ) -> list[TracedStep]:
        """Choose the steps of some parts and phases; None means all.

        Raises:
            InvalidInput: there is no such part.
        """
        names = self.parts if parts is None else tuple(parts)
        if unknown := set(names) - set(self.parts):
            raise InvalidInput("parts", f"must be among {', '.join(self.parts)}, got {unknown}")
        wanted = {self.parts.index(name) for name in names}
        allowed = None if phases is None else set(phases)
        return [
            step
            for step in self.steps
            if step.part in wanted and (allowed is None or step.phase in allowed)
        ]

    def joined(self, other: "Trace") -> "Trace":
        """Append another trace; parts of one name become one.

        Raises:
            InvalidInput: they are of different models.
        """
        mine = (self.model_digest, self.num_experts, self.top_k, self.layers)
        if mine != (other.model_digest, other.num_experts, other.top_k, other.layers):
            raise InvalidInput("trace", "must be of the same model")
        parts = tuple(dict.fromkeys([*self.parts, *other.parts]))
        moved = tuple(
            TracedStep(parts.index(other.parts[step.part]), step.decode_rows, step.topk_ids)
            for step in other.steps
        )
        return Trace(*mine, parts, self.steps + moved)

    def encode(self) -> bytes:
        """Write the file's content.

        Raises:
            InvalidInput: a step has another shape than the trace, an id is no expert, or the whole
                is too large.
        """
        for step in self.steps:
            self._require_fitting(step)
        header = _Header(
            model_digest=self.model_digest,
            num_experts=self.num_experts,
            top_k=self.top_k,
            layers=list(self.layers),
            parts=list(self.parts),
            steps=len(self.steps),
            rows=self.num_rows,
        )
        _require_size(header)
        table = np.array(
            [(step.part, step.topk_ids.shape[1], step.decode_rows) for step in self.steps],
            _PER_STEP,
        )
        ids = [step.topk_ids.astype(_id_type(self.num_experts)) for step in self.steps]
        rows = np.concatenate(ids, axis=1) if ids else np.zeros((len(self.layers), 0, self.top_k))
        packed = _packed(table.tobytes() + rows.transpose(0, 2, 1).tobytes())
        text = msgspec.json.encode(header)
        return _HEAD.pack(MAGIC, VERSION, len(text)) + text + packed

    def _require_fitting(self, step: TracedStep) -> None:
        shape, ids = step.topk_ids.shape, step.topk_ids
        if (shape[0], shape[2]) != (len(self.layers), self.top_k) or shape[1] < 1:
            raise InvalidInput("topk_ids", f"must be [{len(self.layers)}, T, {self.top_k}]")
        if not 0 <= ids.min() <= ids.max() < self.num_experts:
            raise InvalidInput("topk_ids", f"must be in 0..{self.num_experts - 1}")
        if not 0 <= step.part < len(self.parts) or not 0 <= step.decode_rows <= shape[1]:
            raise InvalidInput("step", "must be of a part, with at most all rows decoded")

    @classmethod
    def decode(cls, data: bytes) -> "Trace":
        """Read a file's content.

        Raises:
            InvalidInput: it is no trace, is of another version, damaged or too large.
        """
        header, packed = _read_header(data)
        size = _require_size(header)
        unpack = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_UNPACK_MEMORY_BYTES)
        try:
            content = unpack.decompress(packed, max_length=size + 1)
        except lzma.LZMAError as error:
            raise InvalidInput("trace", f"is damaged: {error}") from error
        if len(content) != size or not unpack.eof or unpack.unused_data:
            raise InvalidInput("trace", "is damaged: has another length than its header says")
        table = np.frombuffer(content, _PER_STEP, header.steps)
        ids = np.frombuffer(content, _id_type(header.num_experts), offset=table.nbytes)
        ids = ids.reshape(len(header.layers), header.top_k, header.rows).transpose(0, 2, 1)
        return cls._checked(header, table, ids)

    @classmethod
    def _checked(cls, header: _Header, table: NDArray[Any], ids: NDArray[Any]) -> "Trace":
        if int(table["rows"].sum(dtype=np.int64)) != header.rows:
            raise InvalidInput("trace", "is damaged: the rows of its steps do not add up")
        ends = table["rows"].cumsum(dtype=np.int64)
        steps = tuple(
            TracedStep(int(part), int(decoded), ids[:, end - rows : end])
            for part, rows, decoded, end in zip(
                table["part"], table["rows"], table["decode_rows"], ends, strict=True
            )
        )
        trace = cls(
            header.model_digest,
            header.num_experts,
            header.top_k,
            tuple(header.layers),
            tuple(header.parts),
            steps,
        )
        for step in steps:
            trace._require_fitting(step)
        return trace


def _packed(content: bytes) -> bytes:
    dictionary = min(max(len(content), 1 << 12), 1 << 23)
    method = {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": dictionary}
    return lzma.compress(content, check=lzma.CHECK_CRC64, filters=[method])


def _read_header(data: bytes) -> tuple[_Header, bytes]:
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise InvalidInput("trace", "is not a routing trace")
    _, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise InvalidInput("trace", f"is of version {version}, this reads {VERSION}")
    if length > min(_MAX_HEADER_BYTES, len(data) - _HEAD.size):
        raise InvalidInput("trace", "is damaged: its header is cut off")
    end = _HEAD.size + length
    try:
        header = msgspec.json.decode(data[_HEAD.size : end], type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInput("trace", f"is damaged: {error}") from error
    return header, data[end:]


def _require_size(header: _Header) -> int:
    """Count the bytes of the uncompressed steps, and refuse too many."""
    per_row = len(header.layers) * header.top_k * _id_type(header.num_experts).itemsize
    size = header.steps * _PER_STEP.itemsize + header.rows * per_row
    if size > MAX_BYTES:
        raise InvalidInput("trace", f"has {size} bytes unpacked, at most {MAX_BYTES} are read")
    return size


def _id_type(num_experts: int) -> np.dtype[Any]:
    return np.dtype(np.uint8 if num_experts <= 256 else "<u2")


def layer_batches(steps: Sequence[TracedStep], layer_idx: int) -> list[NDArray[Any]]:
    """The dispatch batches of one layer, each ``[T, k]``."""
    return [step.topk_ids[layer_idx] for step in steps]
