"""A grouped-query model in plain torch, through whose frozen weights gradients reach united experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from moesaic.kernels.decoder_step import Rotation
from moesaic.models.configuration.architecture import MoE
from moesaic.models.layers.rope import RotaryEmbedding
from moesaic_lab.distillation.frozen import Both, FrozenLayer, FrozenWeights
from moesaic_lab.distillation.group import mlp

PADDED = 1.25  # the longest sequence of those that attend together, over the shortest


@dataclass(frozen=True)
class Degraded:
    """A way to serve the choices of a pass.

    Attributes:
        way: experts of one group.
        united: by sparse layer, ``gate_up`` ``[U, 2I, H]`` and ``down`` ``[U, H, I]``.
        threshold: share of a layer's choices whose experts stay, the most popular first; 0 to 1.
        apart: True: each sequence is split by itself, and an expert that would go alone of its group stays, as in
            serving. False: all rows are split together, and lone experts go as well.
    """

    way: int
    united: Mapping[int, Both]
    threshold: float = 0.0
    apart: bool = False


@dataclass(frozen=True)
class PassedRows:
    """The rows behind a pass, those of a sequence after those of the one before it.

    Attributes:
        hidden: behind each layer, float32 ``[N, H]``.
        logits: of the next tokens, float32 ``[W, vocab]``.
    """

    hidden: list[Tensor]
    logits: Tensor


class TrainableModel:
    """One model. Its logits equal those of ``moesaic.models.layers.decoder`` up to rounding."""

    def __init__(self, weights: FrozenWeights) -> None:
        """Take the weights."""
        self._weights, self._moe = weights, weights.config.moe
        self._rotary = RotaryEmbedding(
            weights.config.rope,
            weights.shape.head_dim,
            interleaved=False,
            device=weights.embedding.device,
        )

    def compute(
        self,
        sequences: Sequence[Sequence[int]],
        degraded: Degraded | None = None,
        wanted: Tensor | None = None,
    ) -> PassedRows:
        """Compute some sequences of token ids.

        Args:
            sequences: each from its first position.
            degraded: None: its own expert serves every choice.
            wanted: rows whose logits are wanted, int64 ``[W]``; None: all.
        """
        rows = _RowsOf(sequences)
        positions = torch.cat([torch.arange(len(own)) for own in sequences])
        rotation = self._rotary.rotation(positions, torch.float32)
        x = F.embedding(
            torch.tensor([t for own in sequences for t in own]), self._weights.embedding
        )
        hidden = []
        for index, layer in enumerate(self._weights.layers):
            x = x + self._attend(index, layer, self._normed(x, layer.norm), rotation, rows)
            normed = self._normed(x, layer.mlp_norm)
            x = x + self.feed_forward(index, layer, normed, degraded, rows.sequence)
            hidden.append(x)
        x = x if wanted is None else x.index_select(0, wanted)
        return PassedRows(hidden, F.linear(self._normed(x, self._weights.norm), self._weights.head))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._weights.config.rms_norm_eps)

    def _attend(
        self, index: int, layer: FrozenLayer, x: Tensor, rotation: Rotation, rows: "_RowsOf"
    ) -> Tensor:
        shape = self._weights.shape
        query, key, value = (
            F.linear(x, *both).view(len(x), -1, shape.head_dim) for both in layer.qkv
        )
        if layer.qk_norm is not None:
            query, key = map(self._normed, (query, key), layer.qk_norm)
        query, key = _turned(query, rotation), _turned(key, rotation)
        return F.linear(rows.attend(query, key, value, shape.window_of(index)), *layer.output)

    def feed_forward(
        self,
        index: int,
        layer: FrozenLayer,
        x: Tensor,
        degraded: Degraded | None,
        sequence: Tensor,
    ) -> Tensor:
        """Compute the MLP of a layer, or its experts, some of them ``degraded``, for the normed rows ``x``."""
        if layer.gate is None:
            return mlp(x, *layer.experts[0])
        weights, ids = _choose(F.linear(x, layer.gate), self._moe)
        experts = list(layer.experts)
        if degraded is not None:
            going = _going(ids, len(experts), sequence, degraded)
            ids = torch.where(going, len(experts) + ids // degraded.way, ids)
            experts += zip(*degraded.united[index], strict=True)
        out = _served(x, weights, ids, experts)
        if layer.shared is not None:
            assert layer.shared_gate is not None
            out = out + F.linear(x, layer.shared_gate).sigmoid() * mlp(x, *layer.shared)
        return out


class _RowsOf:
    """The rows of some sequences; those of about one length attend together, which saves padding."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        starts = [0, *accumulate(map(len, sequences))]
        groups: list[list[int]] = []
        for index in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
            shortest = len(sequences[groups[-1][0]]) if groups else 0
            if len(sequences[index]) > PADDED * shortest:
                groups.append([])
            groups[-1].append(index)
        self._padded = [
            pad_sequence(
                [torch.arange(starts[i], starts[i + 1]) for i in group],
                batch_first=True,
                padding_value=-1,
            )
            for group in groups
        ]
        together = torch.cat([rows[rows >= 0] for rows in self._padded])
        self._place = together.argsort()
        self.sequence = torch.arange(len(sequences)).repeat_interleave(
            torch.tensor([len(own) for own in sequences])
        )  # of each row

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """Mix ``[N, heads, d]`` within each sequence; ``[N, heads * d]``."""
        out = []
        for rows in self._padded:
            at, real = rows.flatten().clamp(min=0), (rows >= 0).flatten().nonzero().squeeze(1)
            steps = torch.arange(rows.shape[1])
            # Padding is behind the rows, so that none of them sees it.
            mask = (steps <= steps[:, None]) & (steps > steps[:, None] - (window or len(steps)))
            q, k, v = (
                part.index_select(0, at).view(*rows.shape, *part.shape[1:]).transpose(1, 2)
                for part in (query, key, value)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            out.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, real))
        return torch.cat(out).index_select(0, self._place)


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs ``(i, i + d/2)`` of each head, ``[N, heads, d]``."""
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return x * rotation.cos.unsqueeze(1) + swapped * rotation.sin.unsqueeze(1)


def _choose(logits: Tensor, moe: MoE) -> tuple[Tensor, Tensor]:
    """Choose as ``Gating`` does by a softmax, without groups but with gradients."""
    weights, ids = logits.softmax(dim=-1).topk(moe.top_k, dim=-1)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * moe.routed_scaling_factor, ids


def _going(ids: Tensor, num_experts: int, sequence: Tensor, degraded: Degraded) -> Tensor:
    """Find the choices ``[N, k]`` whose experts do not stay, bool ``[N, k]``."""
    batch = sequence[:, None] if degraded.apart else torch.zeros_like(sequence)[:, None]
    num_batches, way = int(batch.max()) + 1, degraded.way
    counts = torch.bincount(
        (batch * num_experts + ids).flatten(), minlength=num_batches * num_experts
    )
    counts = counts.view(num_batches, num_experts)
    sizes, order = counts.sort(dim=1, descending=True, stable=True)
    before = sizes.cumsum(dim=1) - sizes
    goes = before >= degraded.threshold * counts.sum(dim=1, keepdim=True)
    going = torch.empty_like(goes).scatter_(1, order, goes) & (counts > 0)
    if degraded.apart:
        group = (torch.arange(num_experts) // way).expand(num_batches, -1)
        together = torch.zeros_like(counts).scatter_add_(1, group, going.long()).gather(1, group)
        going &= together > 1
    return going[batch, ids]


def _served(x: Tensor, weights: Tensor, ids: Tensor, experts: list[Both]) -> Tensor:
    """Sum up what experts say of their rows; a row's choices of one expert count once, with all their weight."""
    served = x.new_zeros(len(x), len(experts)).scatter_add(1, ids, weights).T  # [E, N]
    pairs = served.nonzero()
    expert, row = pairs.unbind(1)
    counts = torch.bincount(expert, minlength=len(experts)).tolist()
    said = [
        mlp(own, *both)
        for own, both in zip(torch.split(x.index_select(0, row), counts), experts, strict=True)
        if len(own)
    ]
    weight = served.flatten().index_select(0, expert * len(x) + row)
    return torch.zeros_like(x).index_add(0, row, torch.cat(said) * weight.unsqueeze(1))
