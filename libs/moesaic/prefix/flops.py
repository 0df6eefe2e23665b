"""Costs of computing tokens, in whole FLOPs: integers, so that sums can be taken back exactly.

A layer costs its weights twice per token (multiply, add) and ``per_pair`` for each key that a query
sees. The second part is the larger one in long contexts. A cached prefix does not save it: its keys
are still attended to (MoE-Prefill section 7.3, Eq. 2, with true attention in place of a constant per
token).
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionFlops:
    """One layer's attention."""

    per_token: int  # of the projections
    per_pair: int  # of one query and one key, all heads
    window: int | None = None  # keys that a query sees at most


def grouped_query(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None
) -> AttentionFlops:
    """Count the FLOPs of attention whose heads share keys and values in groups."""
    weights = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
    return AttentionFlops(2 * weights, 4 * num_heads * head_dim, window)


def latent(
    hidden_size: int,
    num_heads: int,
    q_lora_rank: int | None,
    kv_lora_rank: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    v_head_dim: int,
) -> AttentionFlops:
    """Count the FLOPs of multi-head latent attention, expanded (DeepSeek-V2, arXiv:2405.04434)."""
    qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
    if q_lora_rank is None:
        queries = hidden_size * num_heads * qk_head_dim
    else:
        queries = q_lora_rank * (hidden_size + num_heads * qk_head_dim)
    down = hidden_size * (kv_lora_rank + qk_rope_head_dim)
    up = kv_lora_rank * num_heads * (qk_nope_head_dim + v_head_dim)
    output = num_heads * v_head_dim * hidden_size
    per_pair = 2 * num_heads * (qk_head_dim + v_head_dim)
    return AttentionFlops(2 * (queries + down + up + output), per_pair)


def gated_mlp(hidden_size: int, size: int) -> int:
    """Count the FLOPs per token of one gated MLP: an expert, a shared expert or a dense layer."""
    return 6 * hidden_size * size


class ModelFlops:
    """Costs of one model."""

    def __init__(
        self, attention: Iterable[AttentionFlops], feed_forward_per_token: int, head: int
    ) -> None:
        """
        Args:
            attention: attention of each layer.
            feed_forward_per_token: gates, chosen and shared experts, dense MLPs, of all layers.
            head: FLOPs of turning one row into logits.
        """
        layers = list(attention)
        self.per_token = feed_forward_per_token + sum(layer.per_token for layer in layers)
        self.head = head
        self._per_pair: dict[int | None, int] = {}
        for layer in layers:
            known = self._per_pair.get(layer.window, 0)
            self._per_pair[layer.window] = known + layer.per_pair

    def span(self, start: int, end: int) -> int:
        """Count the FLOPs of the tokens at positions ``start .. end - 1``, after the KV of those before.

        Returns:
            0 if there are no tokens.
        """
        if end <= start:
            return 0
        cost = self.per_token * (end - start)
        for window, per_pair in self._per_pair.items():
            cost += per_pair * (_keys_seen(end, window) - _keys_seen(start, window))
        return cost

    def continuation(self, start: int, count: int) -> int:
        """Count the FLOPs of ``count`` more tokens after position ``start``, each with its logits."""
        return self.span(start, start + count) + self.head * max(0, count)


def _keys_seen(num_tokens: int, window: int | None) -> int:
    """Count the keys that the queries of the first tokens see together."""
    near = num_tokens if window is None else min(num_tokens, window)
    return near * (near + 1) // 2 + (num_tokens - near) * (window or 0)


def saturation_flops(reference_flops: int, slowdown: float = 1.0, *, margin: float = 1.2) -> int:
    """Find the least work that hides a worker's slowest weight transfer (MoE-Prefill Eq. 3).

    Args:
        reference_flops: FLOPs of a forward pass over the engine's largest step.
        slowdown: the slowest layer's time over that of one without transfers; at least 1, as of an
            uncalibrated worker.
        margin: room for jitter.
    """
    return round(margin * reference_flops * max(1.0, slowdown))
