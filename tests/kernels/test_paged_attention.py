"""The CPU's kernel of paged attention against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.kernels.paged_attention import paged_attention, paged_attention_reference
from moesaic.kernels.paged_rows import KVLayout, PagedRows
from tests.kernels.kept_blocks import by_head

pytestmark = pytest.mark.usefixtures("native")
NUM_BLOCKS = 110


class Case:
    """Sequences of (rows, length) over one cache, their blocks scattered."""

    def __init__(
        self, sequences: list[tuple[int, int]], heads: int, layout: KVLayout,
        width: int, block_size: int = 16, seed: int = 0, sinks: float | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.layout, self.block_size = layout, block_size
        self.cached = torch.randn(NUM_BLOCKS * block_size, width, generator=generator)
        self.counts = [rows for rows, _ in sequences]
        self.lengths = [length for _, length in sequences]
        num_rows = sum(self.counts)
        self.queries = torch.randn(num_rows, heads, layout.key_dim, generator=generator)
        self.sinks = None if sinks is None else sinks + torch.randn(heads, generator=generator)
        free = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
        used = [-(-length // block_size) for length in self.lengths]
        self.tables = [[free.pop() for _ in range(n)] for n in used]

    def attend(self, kernel: object, window: int | None, sequences: slice = slice(None)) -> Tensor:
        counts, lengths = self.counts[sequences], self.lengths[sequences]
        tables, cached = self.tables[sequences], self.cached
        if kernel is paged_attention and self.layout.value_column:
            cached = by_head(cached, self.layout.num_kv_heads, self.block_size)
        width = max(map(len, tables))
        firsts = [sum(self.counts[:i]) for i in range(len(self.counts))][sequences]
        rows = PagedRows(
            first_rows=torch.tensor(firsts, dtype=torch.int32),
            num_rows=torch.tensor(counts, dtype=torch.int32),
            lengths=torch.tensor(lengths, dtype=torch.int32),
            block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables]).int(),
            max_rows=max(counts),
            max_length=max(lengths),
        )
        out = torch.zeros(*self.queries.shape[:2], self.layout.value_dim)
        scale = self.layout.key_dim**-0.5
        args = (rows, self.layout, self.block_size, scale, window, out, self.sinks)
        kernel(self.queries, cached, *args)  # type: ignore[operator]
        return out

    def exact(self, window: int | None) -> Tensor:
        """In float64, over all tokens of a sequence at once, with weights of none where a row may not look."""
        layout, out = self.layout, []
        kept = self.cached.double().view(NUM_BLOCKS, self.block_size, -1)
        group = self.queries.shape[1] // layout.num_kv_heads
        key_columns, value_columns = (
            layout.num_kv_heads * dim for dim in (layout.key_dim, layout.value_dim)
        )
        queries = self.queries.double().split(self.counts)
        for own, length, table in zip(queries, self.lengths, self.tables, strict=True):
            tokens = kept[table].flatten(0, 1)[:length]
            keys = tokens[:, :key_columns].view(length, -1, layout.key_dim)
            values = tokens[:, layout.value_column :][:, :value_columns].view(
                length, -1, layout.value_dim
            )
            keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", own, keys) / layout.key_dim**0.5
            rows, positions = torch.arange(length - len(own), length), torch.arange(length)
            seen = positions <= rows[:, None]
            if window is not None:
                seen &= positions > rows[:, None] - window
            weights = scores.exp() * seen
            sinks = 0.0 if self.sinks is None else self.sinks.double().exp()[:, None]
            sums = weights.sum(dim=2) + sinks
            out.append(torch.einsum("hqk,khd->qhd", weights / sums[..., None], values))
        return torch.cat(out)


def grouped(
    sequences: list[tuple[int, int]], kv_heads: int, group: int, dim: int, **more: Any
) -> Case:
    layout = KVLayout.grouped(kv_heads, dim)
    return Case(sequences, kv_heads * group, layout, 2 * kv_heads * dim, **more)


SEQUENCES = st.lists(
    st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(
    sequences=SEQUENCES,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dim=st.integers(1, 140),
    window=st.none() | st.integers(1, 150),
    block_size=st.sampled_from([8, 12, 16, 32]),
    seed=st.integers(0, 1000),
    sinks=st.none() | st.sampled_from([-200.0, -3.0, 0.0, 4.0]),
)
def test_it_equals_the_reference(
    sequences: list[tuple[int, int]], kv_heads: int, group: int, dim: int,
    window: int | None, block_size: int, seed: int, sinks: float | None,
) -> None:  # fmt: skip
    case = grouped(sequences, kv_heads, group, dim, block_size=block_size, seed=seed, sinks=sinks)

    expected = case.attend(paged_attention_reference, window)

    torch.testing.assert_close(case.attend(paged_attention, window), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sinks", [None, -2.0, 3.0])
@pytest.mark.parametrize("window", [None, 1, 13, 64, 128])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 8, 64), (3, 5, 7)])
def test_windows_and_sinks_are_exact(
    kv_heads: int, group: int, dim: int, window: int | None, sinks: float | None
) -> None:
    """One row, a few, and a chunk behind contexts on both sides of the window."""
    case = grouped([(1, 12), (3, 131), (41, 150), (1, 300)], kv_heads, group, dim, sinks=sinks)

    exact = case.exact(window)

    for kernel in (paged_attention, paged_attention_reference):
        torch.testing.assert_close(
            case.attend(kernel, window).double(), exact, atol=2e-6, rtol=1e-5
        )


def test_a_sink_beyond_all_scores_leaves_nothing() -> None:
    case = grouped([(2, 70)], 1, 2, 16, sinks=300.0)

    out = case.attend(paged_attention, None)

    assert out.isfinite().all()
    assert out.abs().max() < 1e-30


@settings(deadline=None, max_examples=30)
@given(SEQUENCES, st.integers(1, 20), st.integers(1, 90), st.integers(1, 20))
def test_latents_are_keys_and_values(
    sequences: list[tuple[int, int]], heads: int, rank: int, rope: int
) -> None:
    case = Case(sequences, heads, KVLayout.latent(rank, rope), rank + rope)

    expected = case.attend(paged_attention_reference, None)

    torch.testing.assert_close(case.attend(paged_attention, None), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("sinks", [None, 0.0])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("block_size", [8, 12, 16, 64])
@pytest.mark.parametrize("window", [None, 50])
def test_no_bit_of_a_row_depends_on_the_rows_beside_it(
    window: int | None, block_size: int, latent: bool, sinks: float | None
) -> None:
    """The last rows of a sequence alone, in company, and as the end of a long chunk."""
    length = 333

    def last(count: int) -> Case:
        sequence, more = [(count, length)], {"block_size": block_size, "sinks": sinks}
        if latent:
            return Case(sequence, 4, KVLayout.latent(40, 8), 48, **more)
        return grouped(sequence, 2, 2, 24, **more)

    whole = last(length)
    expected = whole.attend(paged_attention, window)

    for count in (1, 2, 3, 7, 100):
        chunk = last(count)
        chunk.cached, chunk.tables, chunk.sinks = whole.cached, whole.tables, whole.sinks
        chunk.queries = whole.queries[-count:].contiguous()
        assert torch.equal(chunk.attend(paged_attention, window), expected[-count:])


def test_sequences_do_not_touch_each_other() -> None:
    sequences = [(1, 100), (1, 3), (30, 64), (1, 200), (1, 65), (1, 1), (2, 16), (1, 17), (1, 128)]
    case = grouped(sequences, 2, 2, 24)
    together = case.attend(paged_attention, None)

    for i in range(len(sequences)):
        first = sum(case.counts[:i])
        mine = slice(first, first + case.counts[i])
        alone = case.attend(paged_attention, None, slice(i, i + 1))
        assert torch.equal(alone[mine], together[mine])
        assert not alone[mine.stop :].any()


def test_what_lies_behind_a_sequence_is_never_seen() -> None:
    case = grouped([(1, 37), (20, 37)], 2, 1, 24)
    expected = case.attend(paged_attention, None)
    for table, length in zip(case.tables, case.lengths, strict=True):
        last = table[-1] * case.block_size
        case.cached[last + length % case.block_size : last + case.block_size] = float("nan")

    assert torch.equal(case.attend(paged_attention, None), expected)


def test_a_number_that_is_none_reaches_those_that_see_it() -> None:
    case = grouped([(8, 100), (1, 40)], 1, 1, 24)
    expected = case.attend(paged_attention, None)
    slot = case.tables[0][95 // 16] * 16 + 95 % 16
    case.cached[slot, 0] = float("nan")  # one key of position 95; the rows are 92 to 99

    out = case.attend(paged_attention, None)

    assert out[3:8].isnan().all()
    assert torch.equal(out[[0, 1, 2, 8]], expected[[0, 1, 2, 8]])
