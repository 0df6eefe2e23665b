"""FLOPs against counting every weight and every pair of query and key."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from moesaic.prefix.flops import (
    AttentionFlops,
    ModelFlops,
    gated_mlp,
    grouped_query,
    latent,
    saturation_flops,
)

LAYERS = st.lists(
    st.builds(
        AttentionFlops,
        per_token=st.integers(0, 50),
        per_pair=st.integers(1, 9),
        window=st.none() | st.integers(1, 12),
    ),
    min_size=1,
    max_size=4,
)


@given(LAYERS, st.integers(0, 40), st.integers(0, 40))
def test_a_span_costs_what_its_tokens_and_pairs_cost_one_by_one(layers, start, end) -> None:
    flops = ModelFlops(layers, feed_forward_per_token=100, head=7)

    pairs = sum(
        layer.per_pair * min(position + 1, layer.window or 1 << 30)
        for layer in layers
        for position in range(start, end)
    )
    per_token = 100 + sum(layer.per_token for layer in layers)
    assert flops.span(start, end) == pairs + per_token * max(0, end - start)


@given(LAYERS, *[st.integers(0, 40)] * 3)
def test_spans_add_up(layers, one, two, three) -> None:
    flops = ModelFlops(layers, feed_forward_per_token=100, head=7)
    a, b, c = sorted((one, two, three))

    assert flops.span(a, b) + flops.span(b, c) == flops.span(a, c)


def test_weights_are_counted_twice_per_token() -> None:
    # Qwen3-30B-A3B's attention: 2048 wide, 32 heads, 4 of keys and values, 128 each.
    assert grouped_query(2048, 32, 4, 128).per_token == 2 * 2048 * 128 * (32 + 4 + 4 + 32)
    assert grouped_query(2048, 32, 4, 128, window=9) == dataclasses.replace(
        grouped_query(2048, 32, 4, 128), window=9
    )
    # DeepSeek-V2-Lite's: no query compression, latent of 512, heads of 128 + 64 and 128.
    lite = latent(2048, 16, None, 512, 128, 64, 128)
    weights = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048
    assert (lite.per_token, lite.per_pair) == (2 * weights, 2 * 16 * (192 + 128))
    assert gated_mlp(8, 4) == 2 * 3 * 8 * 4


def test_the_threshold_is_never_below_the_reference_with_its_margin() -> None:
    assert saturation_flops(1000) == 1200
    assert saturation_flops(1000, 0.5) == 1200
    assert saturation_flops(1000, 3.0) == 3600
