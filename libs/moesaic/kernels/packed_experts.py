# Packed experts: the weighted sum of gated experts over the rows routed to them, by the kernels for CPUs.
#   Layout     each panel of gate_up has gates and their ups; rows are sorted by slot.
#   Cost       2 * 3 * R * H * I operations; the active slots' weights are read once, others never.
#   Order      a row's experts are added in ascending slot order: same input, same sum.
#   Reference  moesaic.kernels.grouped_experts, on plain experts; int8 rounds beside it.
"""Experts in the form that the kernels for CPUs compute with."""

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.packed_matrix import PackedMatrix, form_of
from moesaic.kernels.stored_weights import StoredWeight
from moesaic.native.library import lib, scratch
from moesaic.native.structs import ExpertArgs

Clamped = tuple[float, float]
"""Slope and limit of an activation, where None is SwiGLU: ``gate * sigmoid(slope * gate) * (up + 1)``, with gates up
to ``limit`` and ups within it on both sides, as in gpt-oss (arXiv:2508.10925)."""


class PackedMLP:
    """Weights packed for the kernels for CPUs: each panel of the first has gates and their ups."""

    def __init__(
        self,
        gate_up: StoredWeight,
        down: StoredWeight,
        quantization: Quantization = "none",
        *,
        biases: tuple[Tensor, Tensor] | None = None,
        activation: Clamped | None = None,
    ) -> None:
        """Pack the weights, see ``make_mlp``; the caller's are needed no longer."""
        of_gate_up, of_down = biases or (None, None)
        first = PackedMatrix.of(gate_up, of_gate_up, form_of(gate_up, quantization), halves=2)
        second = PackedMatrix.of(down, of_down, form_of(down, quantization))
        self._take(first, second, activation)

    @classmethod
    def of_packed(
        cls, gate_up: PackedMatrix, down: PackedMatrix, activation: Clamped | None = None
    ) -> "PackedMLP":
        """Compute with matrices that are packed already, in place."""
        mlp = cls.__new__(cls)
        mlp._take(gate_up, down, activation)
        return mlp

    def _take(self, gate_up: PackedMatrix, down: PackedMatrix, activation: Clamped | None) -> None:
        self.hidden_size, self.size = down.shape
        self.matrices = gate_up, down
        self.nbytes = gate_up.nbytes + down.nbytes
        self.c = ExpertArgs(gate_up=gate_up.c, down=down.c)
        if activation is not None:
            self.c.slope, self.c.limit = activation

    def __call__(self, x: Tensor) -> Tensor:
        """See ``GatedMLP``; float32. It is the only expert of every row."""
        return PackedSlots([self]).compute(x, *_all_in_one(len(x)))


class PackedSlots:
    """The experts of one layer as the kernel for CPUs reads them, slot by slot."""

    def __init__(self, experts: Sequence[PackedMLP | None]) -> None:
        """Take ``S`` experts, one at least; ``None`` for a slot to which no row is routed."""
        self._held = experts
        some = next(mlp for mlp in experts if mlp is not None)
        self._hidden_size, self.size = some.hidden_size, some.size
        self.c = (ctypes.POINTER(ExpertArgs) * len(experts))()
        for slot, mlp in enumerate(experts):
            if mlp is not None:
                self.c[slot] = ctypes.pointer(mlp.c)

    def compute(self, hidden_states: Tensor, topk_weights: Tensor, slot_ids: Tensor) -> Tensor:
        """Compute as ``grouped_experts``, in float32; int32 slots."""
        assert slot_ids.dtype == torch.int32
        hidden_states, topk_weights, slot_ids = (
            tensor.contiguous() for tensor in (hidden_states.float(), topk_weights, slot_ids)
        )
        (num_rows, top_k), threads = slot_ids.shape, torch.get_num_threads()
        assert hidden_states.shape == (num_rows, self._hidden_size)
        out = torch.empty(num_rows, self._hidden_size)
        kernels, hidden_size, size, num_slots = lib(), self._hidden_size, self.size, len(self.c)
        needed = kernels.experts_scratch(
            rows=num_rows,
            top_k=top_k,
            hidden=hidden_size,
            size=size,
            num_slots=num_slots,
            threads=threads,
        )
        kernels.experts(
            slots=self.c,
            num_slots=num_slots,
            x=hidden_states.data_ptr(),
            num_rows=num_rows,
            hidden=hidden_size,
            size=size,
            weights=topk_weights.data_ptr(),
            slot_ids=slot_ids.data_ptr(),
            top_k=top_k,
            out=out.data_ptr(),
            scratch=scratch(needed),
            threads=threads,
        )
        return out


@lru_cache(maxsize=64)
def _all_in_one(num_rows: int) -> tuple[Tensor, Tensor]:
    return torch.ones(num_rows, 1), torch.zeros(num_rows, 1, dtype=torch.int32)
