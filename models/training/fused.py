"""The parts of a training step that are slow when autograd composes them, with gradients by hand.

On a CPU a naive step spends most of its time on large temporaries, not on products of matrices.
These are gathered rows, whose gradients are scattered back one by one, and logits over the whole
vocabulary.
"""

import shutil
from collections.abc import Callable
from typing import Any, ClassVar, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

P = ParamSpec("P")
R = TypeVar("R")

QUERY_BLOCK = 128  # queries that attend at once
LOSS_ROWS = 512  # rows whose logits live at once: 8 MiB of them, which the caches can hold


class _Part(Generic[P, R]):
    """A function of elementwise work, which ``compile_parts`` makes one pass over memory."""

    every: ClassVar["list[_Part[..., Any]]"] = []

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        self.every.append(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def compile_parts() -> None:
    """Have torch compile the elementwise functions below, where a C++ compiler is at hand.

    The rest of a step gains nothing by it, and would be compiled again for each length.
    """
    if shutil.which("g++") or shutil.which("clang++"):
        for part in _Part.every:
            part.function = torch.compile(part.function, dynamic=True)
        _Part.every.clear()


@_Part
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last axis of ``x`` to a mean square of 1, then by ``weight``."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


@_Part
def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + y``, and its ``rms_norm``."""
    total = x + y
    return total, total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps) * weight


@_Part
def heads_of(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, repeats: int
) -> Tensor:
    """Norm and rotate each head, for attention.

    Args:
        x: ``[B, T, heads, D]``.
        weight: ``[D]``, of the norm.
        cos: ``[B, T, 1, D / 2]``, as is ``sin``.
        eps: of the norm.
        repeats: how many query heads share one of ``x``'s.

    Returns:
        ``[B, heads * repeats, T, D]``.
    """
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
    left, right = normed.chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return _repeated(turned.transpose(1, 2), repeats)


def _repeated(x: Tensor, repeats: int) -> Tensor:
    batch, heads, length, size = x.shape
    spread = x.unsqueeze(2).expand(batch, heads, repeats, length, size)
    return spread.reshape(batch, heads * repeats, length, size)


# Visible keys of one block of queries: pack, first query, behind the last, first key, behind the last.
Span = tuple[int, int, int, int, int]


def spans_of(mask: Tensor) -> list[Span]:
    """Find where the true part of ``mask`` (bool ``[B, 1, T, T]``) lies, for each block of queries.

    Each query must see a key.
    """
    length, starts = mask.shape[-1], range(0, mask.shape[-1], QUERY_BLOCK)
    seen = torch.stack([part.any(dim=2)[:, 0] for part in torch.split(mask, QUERY_BLOCK, dim=2)], 1)
    seen = seen.to(torch.uint8)
    first, behind = seen.argmax(dim=-1).tolist(), (length - seen.flip(-1).argmax(dim=-1)).tolist()
    return [
        (pack, start, min(start + QUERY_BLOCK, length), first[pack][block], behind[pack][block])
        for pack in range(len(mask))
        for block, start in enumerate(starts)
    ]


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, spans: list[Span]) -> Tensor:
    """Scaled dot-product attention that skips keys which no query of a block sees.

    Packs hold several documents and are causal, so at 1024 positions that is more than half.

    Args:
        query: float ``[B, heads, T, D]``, as are ``key`` and ``value``.
        bias: float ``[B, 1, T, T]``, added to the scores.
        spans: what ``spans_of`` says of the mask.

    Returns:
        float ``[B, T, heads * D]``.
    """
    if query.device.type != "cpu":
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return mixed.transpose(1, 2).flatten(2)
    out: Tensor = _Attention.apply(query, key, value, bias, spans)  # type: ignore[no-untyped-call]
    return out.flatten(2)


class _Attention(torch.autograd.Function):
    """Torch's own CPU kernels, on slices; autograd would fill a whole gradient with zeros a slice."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, spans: list[Span]
    ) -> Tensor:
        batch, heads, length, size = query.shape
        mixed, sums = query.new_empty(batch, length, heads, size), []
        for span in spans:
            inputs, part_bias, (queries, _) = _sliced(query, key, value, bias, span)
            part, log_sum = _FLASH(*inputs, attn_mask=part_bias)
            mixed.transpose(1, 2)[queries].copy_(part)
            sums.append(log_sum)
        ctx.save_for_backward(query, key, value, bias, mixed, *sums)
        ctx.spans = spans
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, bias, mixed, *sums = ctx.saved_tensors
        grads = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        mixed, grad = mixed.transpose(1, 2), grad.transpose(1, 2)
        for span, log_sum in zip(ctx.spans, sums, strict=True):
            inputs, part_bias, (queries, keys) = _sliced(query, key, value, bias, span)
            of_query, of_key, of_value = _FLASH_BACKWARD(
                grad[queries], *inputs, mixed[queries], log_sum, 0.0, False, attn_mask=part_bias
            )
            grads[0][queries].copy_(of_query)
            grads[1][keys].add_(of_key)
            grads[2][keys].add_(of_value)
        return *grads, None, None


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
Index = tuple[slice, slice, slice]


def _sliced(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, span: Span
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, tuple[Index, Index]]:
    """The operands of one block, its bias, and where its queries and keys lie."""
    pack, start, stop, first, behind = span
    queries = slice(pack, pack + 1), slice(None), slice(start, stop)
    keys = slice(pack, pack + 1), slice(None), slice(first, behind)
    part = bias[pack : pack + 1, :, start:stop, first:behind]
    return (query[queries], key[keys], value[keys]), part, (queries, keys)


@_Part
def activate(hidden: Tensor, weights: Tensor) -> Tensor:
    """Gated activation ``[M, I]`` of ``hidden [M, 2I]``, each row times its weight (``[M, 1]``)."""
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate) * up * weights


@_Part
def activate_backward(grad: Tensor, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``activate``'s ``hidden [M, 2I]`` and ``weights [M]`` from that of its result."""
    gate, up = hidden.chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    weight_grad = (grad * silu * up).sum(dim=-1)
    scaled = grad * weights
    slope = sigmoid + silu * (1 - sigmoid)
    return torch.cat((scaled * up * slope, scaled * silu), dim=-1), weight_grad


def routed_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Sum of each row's chosen experts, weighted.

    Args:
        x: float ``[N, H]``.
        ids: int64 ``[N, k]``, the experts of each row.
        weights: float ``[N, k]``, of ``x``'s dtype.
        gate_up: float ``[E, 2I, H]``, the gate's rows before those of the up projection.
        down: float ``[E, H, I]``.

    Returns:
        float ``[N, H]``.
    """
    out: Tensor = _RoutedExperts.apply(x, ids, weights, gate_up, down)  # type: ignore[no-untyped-call]
    return out


def weighted_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of a linear head, as the weighted mean over rows.

    Args:
        hidden: float ``[R, H]``.
        embedding: float ``[V, H]``, whose product with ``hidden`` is the logits.
        targets: int64 ``[R]``.
        weights: float ``[R]``, not all zero; they get no gradient.

    Returns:
        A scalar of ``hidden``'s dtype.
    """
    out: Tensor = _WeightedLoss.apply(hidden, embedding, targets, weights)  # type: ignore[no-untyped-call]
    return out


class _RoutedExperts(torch.autograd.Function):
    """Rows sorted by expert, so that an expert is one product over a slice.

    Sums over a row's experts read through the inverse permutation, since gathering runs in parallel
    and scattering does not. Weights go onto the activation, which is narrower than the output.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=x.device)
        places = places.view_as(ids)
        counts = torch.bincount(ids.flatten(), minlength=len(down)).tolist()
        sorted_weights = weights.flatten()[order].unsqueeze(-1)
        rows = x.index_select(0, order // ids.shape[1])
        hidden = rows.new_empty(len(rows), gate_up.shape[1])
        for part, expert, out in zip(
            torch.split(rows, counts), gate_up, torch.split(hidden, counts), strict=True
        ):
            torch.mm(part, expert.T, out=out)
        active = activate(hidden, sorted_weights)
        results = torch.empty_like(rows)
        for part, expert, out in zip(
            torch.split(active, counts), down, torch.split(results, counts), strict=True
        ):
            torch.mm(part, expert.T, out=out)
        ctx.save_for_backward(order, places, sorted_weights, rows, hidden, active, gate_up, down)
        ctx.counts = counts
        return _sum_of(results, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        order, places, sorted_weights, rows, hidden, active, gate_up, down = ctx.saved_tensors
        counts = ctx.counts
        grads = grad.index_select(0, order // places.shape[1])
        active_grad, down_grad = torch.empty_like(active), torch.empty_like(down)
        for part, expert, used, out, expert_grad in zip(
            torch.split(grads, counts), down, torch.split(active, counts), torch.split(active_grad, counts), down_grad,
            strict=True,
        ):  # fmt: skip
            torch.mm(part, expert, out=out)
            torch.mm(part.T, used, out=expert_grad)
        hidden_grad, weight_grad = activate_backward(active_grad, hidden, sorted_weights)
        rows_grad, gate_up_grad = grads, torch.empty_like(gate_up)  # the memory has served
        for part, expert, used, out, expert_grad in zip(
            torch.split(hidden_grad, counts), gate_up, torch.split(rows, counts), torch.split(rows_grad, counts),
            gate_up_grad, strict=True,
        ):  # fmt: skip
            torch.mm(part, expert, out=out)
            torch.mm(part.T, used, out=expert_grad)
        return _sum_of(rows_grad, places), None, weight_grad[places], gate_up_grad, down_grad


def _sum_of(rows: Tensor, places: Tensor) -> Tensor:
    """Sum the rows that each line of ``places [N, k]`` names."""
    return F.embedding_bag(places, rows, mode="sum")


class _WeightedLoss(torch.autograd.Function):
    """Makes the gradients along with the loss, while a chunk's logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor
    ) -> Tensor:
        shares = (weights / weights.sum()).to(hidden.dtype)
        hidden_grad, embedding_grad = torch.empty_like(hidden), torch.zeros_like(embedding)
        loss = hidden.new_zeros(())
        buffer = hidden.new_empty(min(LOSS_ROWS, len(hidden)), len(embedding))
        for rows, target, share, out in zip(
            torch.split(hidden, LOSS_ROWS), torch.split(targets, LOSS_ROWS), torch.split(shares, LOSS_ROWS),
            torch.split(hidden_grad, LOSS_ROWS), strict=True,
        ):  # fmt: skip
            logits = torch.mm(rows, embedding.T, out=buffer[: len(rows)])
            torch.log_softmax(logits, dim=-1, out=logits)
            at = target.unsqueeze(-1)
            loss -= (logits.gather(1, at).squeeze(-1) * share).sum()
            grads = logits.exp_().mul_(share.unsqueeze(-1))
            grads.scatter_add_(1, at, -share.unsqueeze(-1))
            torch.mm(grads, embedding, out=out)
            embedding_grad.addmm_(grads.T, rows)
        ctx.save_for_backward(hidden_grad, embedding_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad, embedding_grad = ctx.saved_tensors
        return hidden_grad * grad, embedding_grad * grad, None, None
