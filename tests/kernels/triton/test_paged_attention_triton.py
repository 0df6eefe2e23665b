"""Paged attention's kernel against its reference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from moesaic.kernels import attention_pieces
from moesaic.kernels.paged_attention import paged_attention_reference
from moesaic.kernels.paged_rows import KVLayout, PagedRows
from moesaic.kernels.triton import paged_attention as whole
from moesaic.kernels.triton import split_attention as kernel

GROUPED = [(KVLayout.grouped(2, 16), 8), (KVLayout.grouped(1, 24), 3), (KVLayout.grouped(3, 8), 3)]
LATENT = [(KVLayout.latent(32, 16), 6), (KVLayout.latent(24, 8), 20)]
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Case:
    """Sequences of (rows in this step, tokens in all) over a cache that holds NaN elsewhere."""

    layout: KVLayout
    num_heads: int
    block_size: int
    queries: Tensor
    cached: Tensor
    rows: PagedRows
    sinks: Tensor | None

    def attend(self, function: object, window: int | None, only: slice = slice(None)) -> Tensor:
        """The outputs of the sequences ``only``, NaN in all other rows."""
        shape = (len(self.queries), self.num_heads, self.layout.value_dim)
        out = self.queries.new_full(shape, float("nan"))
        rows = PagedRows(
            self.rows.first_rows[only],
            self.rows.num_rows[only],
            self.rows.lengths[only],
            self.rows.block_tables[only],
            max(self.rows.num_rows[only].tolist(), default=0),
            max(self.rows.lengths[only].tolist(), default=0),
        )
        scale = self.layout.key_dim**-0.5
        arguments = (rows, self.layout, self.block_size, scale, window, out, self.sinks)
        assert callable(function)
        function(self.queries, self.cached, *arguments)
        return out


def make_case(
    sequences: Sequence[tuple[int, int]],
    layout: KVLayout,
    num_heads: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    block_size: int = 4,
    seed: int = 0,
    sinks: bool = False,
) -> Case:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    num_blocks = [-(-length // block_size) for _, length in sequences]
    places = torch.randperm(sum(num_blocks) + 2).tolist()
    width = layout.value_column + layout.num_kv_heads * layout.value_dim
    width = max(width, layout.num_kv_heads * layout.key_dim)
    cached = normal(len(places), block_size, width).fill_(float("nan"))
    tables = torch.full((len(sequences), max(num_blocks, default=0)), -7)  # never to be read
    for sequence, (_, length) in enumerate(sequences):
        mine = [places.pop() for _ in range(num_blocks[sequence])]
        tables[sequence, : len(mine)] = torch.tensor(mine)
        kept = normal(len(mine) * block_size, width)
        kept[length:] = float("nan")
        cached[mine] = kept.view(len(mine), block_size, width)
    counts = torch.tensor([count for count, _ in sequences])
    first_rows = 1 + counts.cumsum(0) - counts  # the first of the queries is nobody's

    def int32(values: Tensor) -> Tensor:
        return values.to(device, torch.int32)

    rows = PagedRows(
        int32(first_rows),
        int32(counts),
        int32(torch.tensor([length for _, length in sequences])),
        int32(tables),
        max_rows=max((count for count, _ in sequences), default=0),
        max_length=max((length for _, length in sequences), default=0),
    )
    queries = normal(1 + int(counts.sum()), num_heads, layout.key_dim)
    learned = normal(num_heads).float() if sinks else None
    return Case(layout, num_heads, block_size, queries, cached.flatten(0, 1), rows, learned)


def check(case: Case, window: int | None) -> None:
    got = case.attend(kernel.paged_attention, window)

    expected = case.attend(paged_attention_reference, window)
    assert got[0].isnan().all()
    got, expected = got[1:].double(), expected[1:].double()
    # bfloat16 rounds the softmax's weights and the outputs, each to 8 bits.
    tolerance = 5e-6 if case.queries.dtype == torch.float32 else 8e-3
    assert (got - expected).norm() <= tolerance * expected.norm()


@settings(max_examples=25, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=3),
    shape=st.sampled_from(GROUPED + LATENT),
    window=st.sampled_from([None, 1, 7]),
    dtype=st.sampled_from(DTYPES),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 10**6),
    sinks=st.booleans(),
)
@example([(40, 0), (33, 60)], GROUPED[0], None, torch.bfloat16, 4, 0, True)  # several tiles of 128
@example([(40, 0), (33, 60)], LATENT[1], 9, torch.float32, 4, 0, False)
def test_it_equals_the_reference(
    device: torch.device,
    sequences: list[tuple[int, int]],
    shape: tuple[KVLayout, int],
    window: int | None,
    dtype: torch.dtype,
    block_size: int,
    seed: int,
    sinks: bool,
) -> None:
    totals = [(rows, rows + before) for rows, before in sequences]
    check(make_case(totals, *shape, device, dtype, block_size, seed, sinks), window)


@settings(max_examples=15, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(12, 70), st.integers(0, 300)), min_size=1, max_size=2),
    shape=st.sampled_from([GROUPED[0], (KVLayout.grouped(1, 16), 8), (KVLayout.grouped(2, 32), 6)]),
    window=st.sampled_from([None, 5, 64, 130]),
    block_size=st.sampled_from([4, 16]),
    seed=st.integers(0, 10**6),
    sinks=st.booleans(),
)
@example([(64, 0)], GROUPED[0], None, 16, 0, False)  # ends with a step of keys
@example([(64, 64)], GROUPED[0], 64, 16, 0, True)
def test_tiles_that_multiply_a_step_ahead_equal_the_reference(
    device: torch.device,
    sequences: list[tuple[int, int]],
    shape: tuple[KVLayout, int],
    window: int | None,
    block_size: int,
    seed: int,
    sinks: bool,
) -> None:
    totals = [(rows, rows + before) for rows, before in sequences]

    check(make_case(totals, *shape, device, torch.bfloat16, block_size, seed, sinks), window)


@pytest.mark.parametrize("shape", [GROUPED[0], LATENT[0]], ids=["grouped", "latent"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_pieces_of_long_contexts_are_merged(
    device: torch.device,
    shape: tuple[KVLayout, int],
    window: int | None,
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_pieces, "SPLIT", 32)
    monkeypatch.setattr(attention_pieces, "MAX_PIECES", 3)  # so that some have more keys
    case = make_case([(1, 5), (1, 32), (3, 33), (1, 150)], *shape, device, sinks=sinks)

    check(case, window)


@pytest.mark.parametrize("shape", [GROUPED[0], LATENT[0]], ids=["grouped", "latent"])
@pytest.mark.parametrize("sinks", [False, True])
def test_chunks_that_do_not_fill_the_gpu_are_cut_into_pieces(
    device: torch.device,
    shape: tuple[KVLayout, int],
    sinks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole, "_PIECE_KEYS", 8)
    case = make_case([(20, 150), (17, 17)], *shape, device, torch.bfloat16, sinks=sinks)

    assert whole.best_pieces(programs=8, keys=160, num_multiprocessors=132) > 1
    check(case, None)


@given(
    programs=st.integers(1, 2000),
    keys=st.integers(1, 200_000),
    multiprocessors=st.sampled_from([1, 108, 132]),
)
@example(programs=64, keys=7936, multiprocessors=132)
def test_pieces_end_before_uncut_tiles_would(
    programs: int, keys: int, multiprocessors: int
) -> None:
    pieces = whole.best_pieces(programs, keys, multiprocessors)

    # Keys that the busiest multiprocessor attends to.
    busiest = -(-programs * pieces // multiprocessors) * -(-keys // pieces)
    assert busiest <= -(-programs // multiprocessors) * keys
    assert pieces == 1 or busiest + 256 <= -(-programs // multiprocessors) * keys
    if programs % multiprocessors == 0 or keys < 512:
        assert pieces == 1
    # Each has scratch of its own.
    assert pieces == 1 or programs * pieces <= 16 * multiprocessors


def test_chunks_of_a_half_model_fill_a_gpu_and_prompts_stay_whole() -> None:
    assert whole.best_pieces(programs=64, keys=7936, num_multiprocessors=132) == 2
    assert whole.best_pieces(programs=128, keys=7936, num_multiprocessors=132) == 1
    assert whole.best_pieces(programs=1024, keys=2048, num_multiprocessors=132) == 1


@pytest.mark.parametrize("shape", [GROUPED[0], LATENT[0]], ids=["grouped", "latent"])
def test_what_a_decoded_row_gets_does_not_depend_on_its_neighbours(
    device: torch.device, shape: tuple[KVLayout, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_pieces, "SPLIT", 32)
    case = make_case([(1, 70), (1, 9), (1, 40)], *shape, device, torch.bfloat16)

    together = case.attend(kernel.paged_attention, None)

    for sequence in range(3):
        alone = case.attend(kernel.paged_attention, None, slice(sequence, sequence + 1))
        assert torch.equal(alone[1 + sequence], together[1 + sequence])


def test_sequences_with_several_tiles_of_rows_are_attended_to_in_pieces(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_pieces, "SPLIT", 32)
    case = make_case([(16, 70), (2, 2), (9, 34)], KVLayout.grouped(1, 16), 3, device)

    check(case, None)
    check(case, 20)


@pytest.mark.parametrize("max_length", [64, 4096])
def test_a_row_gets_the_same_bits_whatever_the_longest_context_may_be(
    device: torch.device, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_pieces, "SPLIT", 32)
    case = make_case([(1, 50), (1, 7)], *GROUPED[0], device)
    expected = case.attend(kernel.paged_attention, None)

    case.rows = replace(case.rows, max_length=max_length)
    out = torch.empty_like(expected)
    scale = case.layout.key_dim**-0.5
    kernel.paged_attention(
        case.queries, case.cached, case.rows, case.layout, case.block_size, scale, None, out
    )

    assert torch.equal(out[1:], expected[1:])


def test_no_sequences_write_nothing(device: torch.device) -> None:
    case = make_case([], *GROUPED[0], device)

    assert case.attend(kernel.paged_attention, None).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 1)],
        [(1, 4096)],
        [(1, 17 * i + 1) for i in range(64)],
        [(1, 32768), (1, 5)],
        [(16, 2000), (9, 9)],
        [(777, 777), (256, 3000), (17, 4000)],
    ],
    ids=["one token", "one", "many", "long", "few rows", "prompts"],
)
@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(
    ("layout", "num_heads", "dtype"),
    [
        (KVLayout.grouped(4, 128), 32, torch.bfloat16),
        (KVLayout.grouped(8, 128), 32, torch.bfloat16),
        (KVLayout.grouped(16, 128), 16, torch.bfloat16),
        (KVLayout.grouped(2, 64), 16, torch.float32),
        (KVLayout.latent(512, 64), 16, torch.bfloat16),
        (KVLayout.latent(512, 64), 128, torch.bfloat16),
    ],
    ids=str,
)
def test_it_equals_the_reference_at_a_models_size(
    sequences: list[tuple[int, int]],
    window: int | None,
    layout: KVLayout,
    num_heads: int,
    dtype: torch.dtype,
) -> None:
    if layout.value_column == 0 and window:
        pytest.skip("no model with latent attention has a window")
    check(make_case(sequences, layout, num_heads, torch.device("cuda"), dtype, 16), window)
