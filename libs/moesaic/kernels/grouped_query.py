# Grouped-query attention between two norms, in one call: norm, projections, norm and rotation of heads,
# cache, attention, output, residual, norm.
#   Reference  the same kernels, called one by one: moesaic.models.grouped_query. The bits are the same.
#   Cost       of few rows, each call from Python costs what it computes: six of seven are saved.
"""Grouped-query attention of a whole layer on a CPU."""

import ctypes

import torch
from torch import Tensor

from moesaic.kernels.linear import PackedMatrix
from moesaic.kernels.native.library import AttentionLayer, AttentionStep, Shape, lib, scratch
from moesaic.kernels.paged_attention import PagedRows, batch_of


class StepOfRows:
    """What all layers of a step are told of its rows."""

    def __init__(
        self,
        shape: Shape,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        slots: Tensor,
        rows: PagedRows,
    ) -> None:
        """The arguments are as in ``store_grouped`` and ``paged_attention``; ``rows`` are all of them."""
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        self._kept = cos, sin, slots, rows  # ``c`` points into them
        self.c = AttentionStep(
            cos.data_ptr(),
            sin.data_ptr(),
            None,
            slots.data_ptr(),
            shape,
            batch_of(rows),
            len(slots),
            interleaved,
        )


class GroupedQueryKernel:
    """One layer's weights as the call takes them."""

    def __init__(
        self,
        qkv: PackedMatrix,
        output: PackedMatrix,
        norm: Tensor,
        qk_norm: Tensor | None,
        norm_behind: Tensor,
        eps: float,
    ) -> None:
        """Take what ``GroupedQueryLayer`` has, and float32 ``[H]`` of the norms before and behind it."""
        self._kept = qkv, output, norm, qk_norm, norm_behind  # ``c`` points into them
        self._hidden_size = len(norm)
        self.c = AttentionLayer(
            qkv.c,
            output.c,
            norm.data_ptr(),
            None if qk_norm is None else qk_norm.data_ptr(),
            norm_behind.data_ptr(),
            eps,
        )

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, step: StepOfRows, cached: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual stream behind attention, and its norm.

        Args:
            hidden: float32 ``[T, H]``.
            delta: what is still to be added to it, or None.
            step: of the ``T`` rows.
            cached: one layer's cache, ``[tokens, width]``; the rows' keys and values are written to it.

        Returns:
            Two of float32 ``[T, H]``.
        """
        hidden = hidden.contiguous()
        delta = None if delta is None else delta.contiguous()
        assert hidden.shape == (step.c.count, self._hidden_size)
        summed, normed = torch.empty(hidden.shape), torch.empty(hidden.shape)
        threads, call = torch.get_num_threads(), lib()
        layer, rows = ctypes.byref(self.c), ctypes.byref(step.c)
        call.grouped_query_layer(
            layer,
            rows,
            hidden.data_ptr(),
            None if delta is None else delta.data_ptr(),
            cached.data_ptr(),
            summed.data_ptr(),
            normed.data_ptr(),
            scratch(call.grouped_query_scratch(layer, rows, threads)),
            threads,
        )
        return summed, normed
