# Grouped-query attention between two norms, in one call: norm, projections, norm and rotation of heads,
# cache, attention, output, residual, norm.
#   Reference  the same kernels, called one by one: moesaic.models.layers.grouped_query. The bits are the same.
#   Cost       with few rows, each call from Python costs as much as it computes: six of seven are saved.
"""Grouped-query attention of a whole layer on a CPU."""

import ctypes

import torch
from torch import Tensor

from moesaic.kernels.packed_matrix import PackedMatrix
from moesaic.kernels.paged_attention import batch_of
from moesaic.kernels.paged_rows import PagedRows
from moesaic.native.library import lib, scratch
from moesaic.native.structs import AttentionLayerArgs, AttentionStepArgs, ShapeArgs


class StepOfRows:
    """The rows of a step, as all layers take them."""

    def __init__(
        self,
        shape: ShapeArgs,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        offsets: Tensor,
        rows: PagedRows,
    ) -> None:
        """The arguments are as in ``store_grouped`` and ``paged_attention``; ``rows`` are all of them."""
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        self._kept = cos, sin, offsets, rows  # ``c`` points into them
        self.c = AttentionStepArgs(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rotated=cos.shape[1],
            offsets=offsets.data_ptr(),
            shape=shape,
            batch=batch_of(rows),
            count=len(offsets),
            interleaved=interleaved,
        )


class GroupedQueryKernel:
    """The weights of one layer, as the call takes them."""

    def __init__(
        self,
        qkv: PackedMatrix,
        output: PackedMatrix,
        norm: Tensor,
        qk_norm: Tensor | None,
        norm_behind: Tensor,
        eps: float,
        *,
        is_wide: bool = False,
        clip: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Take the weights of a ``GroupedQueryLayer``, and those of the norms before and after it, float32 ``[H]``.

        The others are as in ``store_grouped`` and ``paged_attention``.
        """
        self._kept = qkv, output, norm, qk_norm, norm_behind, sinks  # ``c`` points into them
        self._hidden_size = len(norm)
        self.c = AttentionLayerArgs(
            qkv=qkv.c,
            output=output.c,
            norm=norm.data_ptr(),
            qk_norm=None if qk_norm is None else qk_norm.data_ptr(),
            norm_behind=norm_behind.data_ptr(),
            eps=eps,
            window=window or 0,
            sinks=None if sinks is None else sinks.data_ptr(),
            clip=clip or 0.0,
            is_wide=is_wide,
        )

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, step: StepOfRows, cached: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the residual stream after attention, and its norm.

        Args:
            hidden: float32 ``[T, H]``.
            delta: output of the layer before, not added to it yet, or None.
            step: step of the ``T`` rows.
            cached: one layer's cache, ``[tokens, width]``; the rows' keys and values are written to it.

        Returns:
            Two of float32 ``[T, H]``.
        """
        hidden = hidden.contiguous()
        delta = None if delta is None else delta.contiguous()
        assert hidden.shape == (step.c.count, self._hidden_size)
        summed, normed = torch.empty(hidden.shape), torch.empty(hidden.shape)
        threads, kernels = torch.get_num_threads(), lib()
        layer, rows = ctypes.byref(self.c), ctypes.byref(step.c)
        needed = kernels.grouped_query_scratch(layer=layer, step=rows, threads=threads)
        kernels.grouped_query_layer(
            layer=layer,
            step=rows,
            x=hidden.data_ptr(),
            delta=None if delta is None else delta.data_ptr(),
            cache=cached.data_ptr(),
            sum=summed.data_ptr(),
            out=normed.data_ptr(),
            scratch=scratch(needed),
            threads=threads,
        )
        return summed, normed
