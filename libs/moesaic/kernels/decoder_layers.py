# Layers of a decoder one after the other, routed experts included, in one call.
#   Reference  the same kernels, called one by one: moesaic.models.decoder. The bits are the same.
#   Cost       of few rows, what lies between two layers in Python costs a fifth of a step in float32,
#              a third in int8.
"""Several whole layers on a CPU, where all of their experts are in this process."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.kernels.grouped_experts import PackedSlots
from moesaic.kernels.grouped_query import GroupedQueryKernel, StepOfRows
from moesaic.kernels.linear import PackedMatrix
from moesaic.kernels.native.library import DecoderLayer, RoutedExperts, lib, scratch


class RoutedExpertsKernel:
    """One layer's gate and experts as the call takes them."""

    def __init__(
        self, gate: PackedMatrix, slots: PackedSlots, top_k: int, *, normalise: bool, scaling: float
    ) -> None:
        """``gate`` is ``H -> E``, float32; ``slots`` has all ``E`` experts, each in its own slot."""
        assert len(slots.c) == gate.shape[0]
        self._kept = gate, slots  # ``c`` points into them
        self.c = RoutedExperts(gate.c, slots.c, slots.size, top_k, scaling, normalise)


class DecoderLayersKernel:
    """Consecutive layers, the first of them the decoder's first."""

    def __init__(
        self, layers: Sequence[tuple[GroupedQueryKernel, RoutedExpertsKernel]], hidden_size: int
    ) -> None:
        """Take each layer's attention and experts."""
        self._kept, self._hidden_size = layers, hidden_size
        pairs = [(attention.c, experts.c) for attention, experts in layers]
        self._c = (DecoderLayer * len(layers))(*pairs)

    def __call__(
        self, hidden: Tensor, step: StepOfRows, caches: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Through as many layers as there are ``caches``.

        Args:
            hidden: float32 ``[T, H]``, which this call uses up: what goes into the first layer.
            step: of the ``T`` rows.
            caches: of each layer, ``[tokens, width]``; the rows' keys and values are written to it.

        Returns:
            Two of float32 ``[T, H]``: the residual stream, and what is to be added to it.
        """
        assert hidden.is_contiguous()
        assert hidden.shape == (step.c.count, self._hidden_size)
        assert 0 < len(caches) <= len(self._c)
        delta = torch.empty(hidden.shape)
        written = (ctypes.c_void_p * len(caches))(*(cache.data_ptr() for cache in caches))
        threads, call, rows = torch.get_num_threads(), lib(), ctypes.byref(step.c)
        needed = call.decoder_layers_scratch(self._c, len(caches), rows, threads)
        call.decoder_layers(
            self._c,
            len(caches),
            rows,
            written,
            hidden.data_ptr(),
            delta.data_ptr(),
            scratch(needed),
            threads,
        )
        return hidden, delta
