# A whole step of a decoder: embedding, layers, norm, head, in one call. The experts are in this process, or
# other processes are asked for them.
#   Reference  the same kernels, called one by one: moesaic.models.layers.decoder. The bits are the same.
#   Cost       of one row of a small model, what lies in Python between the pieces took a quarter of a
#              step in float32, two fifths in int8.
"""A step of a decoder on a CPU, in one call."""

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from moesaic.kernels.grouped_query import GroupedQueryKernel
from moesaic.kernels.packed_experts import PackedSlots
from moesaic.kernels.packed_matrix import PackedMatrix
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.native.library import lib, scratch
from moesaic.native.structs import (
    ApartArgs,
    AttentionStepArgs,
    BatchArgs,
    DecoderArgs,
    GatingArgs,
    PartArgs,
    RoutedExpertsArgs,
    ShapeArgs,
    WholeLayerArgs,
    WholeStepArgs,
)


class GatingRules(Protocol):
    """The way in which a gate chooses experts."""

    @property
    def c(self) -> GatingArgs:
        """The same for the call; it lives as long as this object."""
        ...

    @property
    def top_k(self) -> int:
        """Experts of a row."""
        ...


class RoutedExpertsKernel:
    """One layer's gate and experts as the call takes them."""

    def __init__(
        self,
        gate: PackedMatrix,
        slots: PackedSlots,
        layer: LayerSubstitution,
        gating: GatingRules,
    ) -> None:
        """``gate`` is ``H -> E``, not quantised. In whole steps ``slots`` has all ``E`` experts, each in its slot, and
        behind them the united ones that ``layer`` has."""
        self._kept = gate, slots, layer, gating  # ``c`` points into them
        self.c = RoutedExpertsArgs(
            gate=gate.c,
            slots=slots.c,
            num_slots=len(slots.c),
            size=slots.size,
            top_k=gating.top_k,
            substitution=layer.c,
            gating=gating.c,
        )


@dataclass(frozen=True)
class Attending:
    """The rows of a step that attend in a layer, the last ``num_rows`` of each sequence."""

    num_rows: Sequence[int]  # [B], 1 or more each
    lengths: Sequence[int]  # [B]: cached tokens, the rows' included
    block_tables: Sequence[Sequence[int]]  # [B]: as many blocks as that takes, or more


@dataclass(frozen=True)
class Rotation:
    """The rotations of rows, or of all positions up to some.

    A pair ``(a, b)`` turns into ``(a cos - b sin, b cos + a sin)``. Pairs are ``(i, i + d/2)``, or
    neighbours where ``interleaved``. With the sign kept in ``sin``, either is one multiply and one
    multiply-add.
    """

    cos: Tensor  # [T, d]
    sin: Tensor  # [T, d], negative at the first of each pair
    interleaved: bool

    def of(self, rows: Tensor) -> "Rotation":
        """Select the rotations of some rows, int64 ``[A]``."""
        return Rotation(self.cos[rows], self.sin[rows], self.interleaved)


@dataclass(frozen=True)
class StepInputs:
    """The rows of a step, or of a part of it.

    Attributes:
        token_ids: ``T`` of them.
        positions: ``T`` of them.
        offsets: ``T`` of them: where in the cache each row's keys and values go; -1: nowhere.
        rotations: rotations for all ``positions``.
        rows: all ``T``.
        last: the rows that attend in the last layer, and their indices, ascending; None: all.
        logits: true if any are wanted.
        promised: promises to all rows, and to those of ``last``; None: every choice is served by its own expert.
    """

    token_ids: Sequence[int]
    positions: Sequence[int]
    offsets: Sequence[int]
    rotations: Rotation
    rows: Attending
    last: tuple[Attending, Sequence[int]] | None = None
    logits: bool = True
    promised: tuple[PromisedRows, PromisedRows] | None = None


class _Numbers:
    """Numbers at an address, for as long as this object lives."""

    def __init__(self, kind: Literal["i", "q"], numbers: Iterable[int]) -> None:
        self._kept = array(kind, numbers)  # ctypes would make a class for every length
        self.address, _ = self._kept.buffer_info()


class DecoderStepKernel:
    """A decoder's weights and its cache."""

    def __init__(
        self,
        layers: Sequence[tuple[GroupedQueryKernel, RoutedExpertsKernel | None]],
        last_kv: PackedMatrix,
        embedding: PackedMatrix,
        norm: Tensor,
        head: PackedMatrix,
        shape: ShapeArgs,
        caches: Sequence[Tensor],
        embedding_multiplier: float = 1.0,
    ) -> None:
        """Take the weights.

        Args:
            layers: each layer's attention, and its experts if they are in this process.
            last_kv: keys and values of the last layer's projection; or all of it.
            embedding: ``vocab`` rows of ``H``, which are looked up.
            norm: before the head, float32 ``[H]``.
            head: ``H -> vocab``.
            shape: shape of every layer's attention; windows may differ.
            caches: one for each layer, ``[tokens, width]``.
            embedding_multiplier: factor on the embedding's output.
        """
        assert len(caches) == len(layers)
        assert all(tensor.is_contiguous() for tensor in (norm, *caches))
        self._kept = layers, last_kv, embedding, norm, head, caches  # the call points into them
        self._shape, self._num_out, self._vocab_size = shape, head.shape[0], embedding.shape[0]
        self._layers_done = ctypes.c_int64()
        whole = [
            WholeLayerArgs(attention=attention.c, moe=experts.c)
            if experts
            else WholeLayerArgs(attention=attention.c)
            for attention, experts in layers
        ]
        self._c = DecoderArgs(
            layers=(WholeLayerArgs * len(whole))(*whole),
            num_layers=len(whole),
            kv=last_kv.c,
            embedding=embedding.c,
            embedding_multiplier=embedding_multiplier,
            norm=norm.data_ptr(),
            head=head.c,
            layers_done=ctypes.addressof(self._layers_done),
        )
        self._caches = (ctypes.c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))

    @property
    def layers_done(self) -> int:
        """Number of layers computed so far; grows while a step runs."""
        return self._layers_done.value

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Run a step, which writes the keys and values of its rows; all experts are in this process.

        Returns:
            float32 ``[A, vocab]``, or ``[0, vocab]``: next-token logits of the rows that attend in the last
            layer.
        """
        step, _kept = self._whole_step(inputs)
        out = self._room_for_logits(inputs)
        decoder, told = ctypes.byref(self._c), ctypes.byref(step)
        threads, kernels = torch.get_num_threads(), lib()
        needed = kernels.decoder_step_scratch(decoder=decoder, step=told, threads=threads)
        kernels.decoder_step(
            decoder=decoder,
            step=told,
            caches=self._caches,
            logits=out.data_ptr() if inputs.logits else None,
            scratch=scratch(needed),
            threads=threads,
        )
        return out

    def apart(self, inputs: Sequence[StepInputs], apart: ApartArgs) -> tuple[Tensor, Any]:
        """Run a step whose experts are in other processes, in parts that take turns.

        Args:
            inputs: inputs of every part.
            apart: the exchanges; its counters and sequence number move on.

        Returns:
            The logits of all parts, as above, and an array of ``PartArgs`` with the exchanges that failed;
            None in their place if there are none.
        """
        steps = [self._whole_step(each) for each in inputs]
        outs = [self._room_for_logits(each) for each in inputs]
        parts = (PartArgs * len(inputs))(
            *(
                PartArgs(step=step, logits=out.data_ptr() if each.logits else None)
                for (step, _kept), out, each in zip(steps, outs, inputs, strict=True)
            )
        )
        decoder, threads, kernels = ctypes.byref(self._c), torch.get_num_threads(), lib()
        needed = kernels.decoder_step_apart_scratch(
            decoder=decoder, apart=apart, parts=parts, num_parts=len(parts), threads=threads
        )
        failed = kernels.decoder_step_apart(
            decoder=decoder,
            apart=apart,
            parts=parts,
            num_parts=len(parts),
            caches=self._caches,
            scratch=scratch(needed),
            threads=threads,
        )
        logits = outs[0] if len(outs) == 1 else torch.cat(outs)
        return logits, parts if failed else None

    def _room_for_logits(self, inputs: StepInputs) -> Tensor:
        attending = inputs.offsets if inputs.last is None else inputs.last[1]
        return torch.empty(len(attending) if inputs.logits else 0, self._num_out)

    def _whole_step(self, inputs: StepInputs) -> tuple[WholeStepArgs, Any]:
        """The arguments, and what they point into."""
        token_ids, positions, offsets = inputs.token_ids, inputs.positions, inputs.offsets
        assert len(token_ids) == len(positions) == len(offsets)
        assert 0 <= min(token_ids) <= max(token_ids) < self._vocab_size
        assert max(positions) < len(inputs.rotations.cos)
        tokens, kept_at = _Numbers("q", token_ids), _Numbers("q", offsets)
        every = _Facts(inputs.rows, positions)
        promised, promised_last = inputs.promised or (None, None)
        assert promised is None or len(promised.degraded) == self._c.num_layers
        everywhere = self._step(every, inputs.rotations, kept_at.address, promised)
        step = WholeStepArgs(all=everywhere, tokens=tokens.address)
        kept: list[Any] = [tokens, kept_at, every, inputs.rotations, inputs.promised]
        if inputs.last is not None:
            attending = _Numbers("q", inputs.last[1])
            few = _Facts(inputs.last[0], [positions[row] for row in inputs.last[1]])
            step.attending = attending.address
            step.last = self._step(few, inputs.rotations, None, promised_last)
            kept += [attending, few]
        return step, kept

    def _step(
        self,
        facts: "_Facts",
        rotations: Rotation,
        offsets: int | None,
        promised: PromisedRows | None,
    ) -> AttentionStepArgs:
        return AttentionStepArgs(
            cos=rotations.cos.data_ptr(),
            sin=rotations.sin.data_ptr(),
            rotated=rotations.cos.shape[1],
            positions=facts.positions.address,
            offsets=offsets,
            shape=self._shape,
            batch=facts.batch,
            count=facts.count,
            interleaved=rotations.interleaved,
            promises=None if promised is None else ctypes.pointer(promised.c),
            degraded=None if promised is None else promised.degraded.data_ptr(),
        )


class _Facts:
    """The rows that attend in a layer, as C reads them."""

    def __init__(self, rows: Attending, positions: Sequence[int]) -> None:
        tables, num = rows.block_tables, len(rows.num_rows)
        width = max(map(len, tables))
        firsts = [0, *accumulate(rows.num_rows)][:-1]
        padded = chain.from_iterable((*table, *[0] * (width - len(table))) for table in tables)
        self._facts = _Numbers("i", chain(firsts, rows.num_rows, rows.lengths, padded))
        self.positions, self.count = _Numbers("q", positions), len(positions)
        first, size = self._facts.address, 4 * num
        self.batch = BatchArgs(
            first_rows=first,
            num_rows=first + size,
            lengths=first + 2 * size,
            block_tables=first + 3 * size,
            count=num,
            table_width=width,
        )
