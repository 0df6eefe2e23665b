"""Code of others on the inputs of a case: torch's, and FlashAttention 3, FlashMLA and Humming where they are installed.

Each function prepares its inputs and returns the work to time. What is missing, or cannot do it, raises an error.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.paged_rows import KVLayout

Work = Callable[[], object]
Peers = dict[str, Callable[[], Work]]
GroupedProduct = Callable[[Tensor, Tensor], Tensor]

HUMMING_FORMS = {
    "fp8": {"dtype": "float8e4m3", "group_size": 128},
    "mxfp4": {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32},
}
FLASH_MLA_BLOCK = 64  # the only one that it has


def experts_by_grouped_mm(
    hidden: Tensor, weights: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor
) -> Work:
    """Compute a layer's experts by torch's grouped products.

    ``gate_up`` is ``[E, 2 I, H]``, ``down`` is ``[E, H, I]``.
    """

    def product(stack: Tensor) -> GroupedProduct:
        return lambda rows, ends: F.grouped_mm(rows, stack.transpose(1, 2), offs=ends[1:])

    return _grouped(hidden, weights, slots, len(gate_up), product(gate_up), product(down))


def experts_by_humming(
    hidden: Tensor, weights: Tensor, slots: Tensor, gate_up: Tensor, down: Tensor, form: str
) -> Work:
    """Compute the same by Humming, which rounds the weights to its own codes of ``form``."""

    def product(stack: Tensor) -> GroupedProduct:
        layer, grouped = _humming_layer(stack, form), {"gemm_type": "grouped_contiguous"}
        return lambda rows, ends: layer(rows, expert_layout=ends, compute_config=grouped)

    return _grouped(hidden, weights, slots, len(gate_up), product(gate_up), product(down))


def linear_by_humming(x: Tensor, weight: Tensor, form: str) -> Work:
    """Multiply by ``weight`` ``[out, in]`` in Humming's codes of ``form``."""
    return partial(_humming_layer(weight, form), x)


def _humming_layer(weight: Tensor, form: str) -> Any:
    *experts, num_out, num_in = weight.shape
    layer = (
        import_module("humming.layer")
        .HummingLayer(
            shape_n=num_out,
            shape_k=num_in,
            num_experts=experts[0] if experts else None,
            weight_config=dict(HUMMING_FORMS[form]),
            torch_dtype=torch.bfloat16,
        )
        .cuda()
    )
    layer.load_from_unquantized(weight)
    layer.transform()
    return layer


def _grouped(
    hidden: Tensor,
    weights: Tensor,
    slots: Tensor,
    num_experts: int,
    gate_up: GroupedProduct,
    down: GroupedProduct,
) -> Work:
    """Compute experts by products of rows in their experts' order, and the ends of these.

    The time includes finding that order.
    """
    top_k = slots.shape[1]

    def compute() -> Tensor:
        chosen, order = slots.flatten().sort(stable=True)
        counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=slots.device)
        counts.index_add_(0, chosen + 1, torch.ones_like(chosen, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = hidden.index_select(0, order // top_k)
        gate, up = gate_up(rows, ends).chunk(2, dim=-1)
        each = down(F.silu(gate) * up, ends)
        weighted = each.float() * weights.flatten()[order].unsqueeze(1)
        sums = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        return sums.index_add_(0, order // top_k, weighted)

    return compute


def attention_peers(
    layout: KVLayout, num_heads: int, batch: int, num_rows: int, length: int
) -> Peers:
    """Attention of others. Their keys lie side by side already, except for FlashMLA's, which are in blocks."""
    queries = partial(_normal, batch, num_rows, num_heads, layout.key_dim)
    if layout.value_column == 0:
        cached = partial(_normal, batch, length, 1, layout.key_dim)
        values = layout.value_dim
        peers: Peers = {"flash_attention_3": lambda: _latent_by_flash(queries(), cached(), values)}
        if num_rows == 1:
            peers["flash_mla"] = lambda: _latent_by_flash_mla(queries(), cached(), values)
        return peers
    keys = partial(_normal, batch, length, layout.num_kv_heads, layout.key_dim)
    peers = {
        "torch_varlen": lambda: _by_varlen(queries(), keys(), keys()),
        "flash_attention_3": lambda: _by_flash(queries(), keys(), keys()),
    }
    # torch has no causal mask but a square one.
    if num_rows in (1, length):
        peers["torch"] = lambda: _by_torch(queries(), keys(), keys())
    return peers


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _by_torch(queries: Tensor, keys: Tensor, values: Tensor) -> Work:
    q, k, v = (each.transpose(1, 2).contiguous() for each in (queries, keys, values))
    causal = queries.shape[1] > 1
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _by_varlen(queries: Tensor, keys: Tensor, values: Tensor) -> Work:
    attend: Any = import_module("torch.nn.attention.varlen").varlen_attn
    (batch, num_rows), length = queries.shape[:2], keys.shape[1]
    ends = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    # Torch 2.11 has no such argument, and groups heads unasked.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(attend).parameters else {}
    rows = [each.flatten(0, 1) for each in (queries, keys, values)]
    where = (ends * num_rows, ends * length, num_rows, length)
    causal = (-1, 0)
    return lambda: attend(*rows, *where, window_size=causal, **grouped)


def _by_flash(queries: Tensor, keys: Tensor, values: Tensor, **more: Tensor) -> Work:
    # Unlike flash_attn_func, it divides long keys among programs by itself.
    attend = import_module("flash_attn_interface").flash_attn_with_kvcache
    lengths = _lengths(keys)
    return lambda: attend(queries, keys, values, cache_seqlens=lengths, causal=True, **more)


def _latent_by_flash(queries: Tensor, cached: Tensor, values: int) -> Work:
    """Attend to latents, whose first ``values`` columns are values and keys, the others keys alone."""
    keys, latents = cached[..., values:], cached[..., :values]
    return _by_flash(queries[..., values:], keys, latents, qv=queries[..., :values])


def _latent_by_flash_mla(queries: Tensor, cached: Tensor, values: int) -> Work:
    flash_mla = import_module("flash_mla")
    batch, lengths = len(cached), _lengths(cached)
    blocks = cached.view(-1, FLASH_MLA_BLOCK, *cached.shape[2:])
    table = torch.arange(len(blocks), dtype=torch.int32, device="cuda").view(batch, -1)
    plan = flash_mla.get_mla_metadata(lengths, queries.shape[1] * queries.shape[2], 1)
    return lambda: flash_mla.flash_mla_with_kvcache(
        queries, blocks, table, lengths, values, *plan, causal=True
    )


def _lengths(keys: Tensor) -> Tensor:
    return torch.full((len(keys),), keys.shape[1], dtype=torch.int32, device="cuda")
