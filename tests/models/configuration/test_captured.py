"""The sizes of captured steps pad few rows, and their bytes hold the tensors that steps share."""

from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parity.cases import CASES, Served, build_reference
from moesaic.models.configuration.captured import captured_bytes, captures, decode_sizes
from moesaic.models.configuration.sizes import Numbers
from moesaic.models.layers.decode_segments import SegmentTensors
from moesaic.models.layers.static_decode import DecodeShapes
from moesaic.services.attention.settings import AttentionSettings


def test_few_rows_have_sizes_of_their_own() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(33) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert decode_sizes(300)[-4:] == [256, 272, 288, 304]
    assert (len(decode_sizes(64)), len(decode_sizes(256))) == (11, 35)


@given(st.integers(1, 4096))
def test_sizes_hold_the_most_rows_and_pad_little(most: int) -> None:
    sizes = decode_sizes(most)

    assert sizes[-1] >= most
    assert most == 1 or sizes[-2] < most
    for size, larger in pairwise(sizes[4:]):
        assert larger - size <= max(8, size // 16)


def test_bytes_hold_the_tensors_that_all_sizes_share(tmp_path: Path) -> None:
    build_reference(CASES[0], tmp_path)
    served = Served(tmp_path)
    numbers = Numbers(on_cpu=False)
    for max_rows, max_length in ((3, 64), (40, 512)):
        tensors = SegmentTensors(served.decoder, served.cache, DecodeShapes(max_rows, max_length))
        kept = sum(tensor.nbytes for tensor in (tensors.logits, tensors.normed, tensors.returned))

        assert captured_bytes(served.config, numbers, max_rows, max_length) > kept


def test_a_long_context_takes_scratch_up_to_a_bound(tmp_path: Path) -> None:
    build_reference(CASES[0], tmp_path)
    config, numbers = Served(tmp_path).config, Numbers(on_cpu=False)
    of = [captured_bytes(config, numbers, 64, 1 << bits) for bits in (9, 10, 15, 16, 17)]

    assert of == sorted(of)
    # Pieces become larger, not more: of a longer context there are more blocks in the tables alone.
    assert of[4] - of[3] == 64 * 4 * (1 << 16) // 16


def test_experts_that_move_are_never_in_captured_steps() -> None:
    settings = AttentionSettings(model="m", device="cuda")

    assert captures(settings)
    for other in ({"offload": True}, {"dispatch": "gathered"}, {"device": "cpu"}):
        assert not captures(settings.model_copy(update=other))
