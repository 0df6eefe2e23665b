import lzma
import struct
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import InvalidInput
from moesaic.placement.traffic.trace import MAX_BYTES, Trace, TracedStep


def trace_of(
    num_experts: int = 6, rows: tuple[int, ...] = (1, 4, 2), parts: tuple[str, ...] = ("a", "b")
) -> Trace:
    rng = np.random.default_rng(len(rows))
    steps = tuple(
        TracedStep(
            number % len(parts),
            (0, count, count // 2)[number % 3],
            np.argsort(rng.random((3, count, num_experts)), axis=2)[:, :, :2],
        )
        for number, count in enumerate(rows)
    )
    return Trace("digest", num_experts, 2, (1, 2, 5), parts, steps)


@settings(max_examples=50, deadline=None)
@given(
    num_experts=st.sampled_from([2, 6, 256, 257, 4096]),
    rows=st.lists(st.integers(1, 30), max_size=6).map(tuple),
)
def test_a_trace_is_read_as_it_was_written(num_experts: int, rows: tuple[int, ...]) -> None:
    trace = trace_of(num_experts, rows)

    again = Trace.decode(trace.encode())

    assert replace(again, steps=()) == replace(trace, steps=())
    assert len(again.steps) == len(trace.steps)
    for one, other in zip(again.steps, trace.steps, strict=True):
        assert (one.part, one.decode_rows, one.phase) == (
            other.part,
            other.decode_rows,
            other.phase,
        )
        np.testing.assert_array_equal(one.topk_ids, other.topk_ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused(data: st.DataObject) -> None:
    good = bytearray(trace_of().encode())
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = bytes(good[:at])
    else:
        good[at] ^= data.draw(st.integers(1, 255))
        bad = bytes(good)

    try:
        read = Trace.decode(bad)
    except InvalidInput:
        return
    # Names and the digest are free text, and JSON may be written in other ways.
    assert len(read.steps) == 3


def with_header(trace: Trace, packed: bytes | None = None, **changes: Any) -> bytes:
    """The file of ``trace`` with a header that says something else."""
    data = trace.encode()
    (length,) = struct.unpack_from("<I", data, 10)
    header = {**msgspec.json.decode(data[14 : 14 + length]), **changes}
    text = msgspec.json.encode(header)
    return data[:10] + struct.pack("<I", len(text)) + text + (packed or data[14 + length :])


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 8},
        {"rows": -1},
        {"rows": 10**30},
        {"steps": 2},
        {"layers": []},
        {"layers": [1, 2]},
        {"num_experts": 1},
        {"num_experts": 70_000},
        {"top_k": 3},
        {"parts": ["a"]},
        {"more": 1},
    ],
)
def test_a_header_that_does_not_fit_its_content_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Trace.decode(with_header(trace_of(), **changes))


def test_nothing_is_unpacked_beyond_what_the_header_says() -> None:
    bomb = lzma.compress(bytes(50_000_000))

    with pytest.raises(InvalidInput, match="another length"):
        Trace.decode(with_header(trace_of(), packed=bomb))
    with pytest.raises(InvalidInput, match=f"at most {MAX_BYTES}"):
        Trace.decode(with_header(trace_of(), packed=bomb, rows=MAX_BYTES))


def test_other_files_and_versions_are_refused() -> None:
    data = trace_of().encode()

    with pytest.raises(InvalidInput, match="not a routing trace"):
        Trace.decode(b"PK" + data[2:])
    with pytest.raises(InvalidInput, match="version 2"):
        Trace.decode(data[:8] + b"\x02" + data[9:])


@pytest.mark.parametrize(
    "step",
    [
        TracedStep(0, 0, np.zeros((2, 1, 2), int)),
        TracedStep(0, 0, np.zeros((3, 0, 2), int)),
        TracedStep(0, 0, np.full((3, 1, 2), 6)),
        TracedStep(0, 0, np.full((3, 1, 2), -1)),
        TracedStep(2, 0, np.zeros((3, 1, 2), int)),
        TracedStep(0, 2, np.zeros((3, 1, 2), int)),
    ],
)
def test_a_step_that_does_not_fit_is_not_written(step: TracedStep) -> None:
    with pytest.raises(InvalidInput):
        replace(trace_of(), steps=(step,)).encode()


def test_parts_of_one_name_are_joined() -> None:
    joined = trace_of(parts=("a", "b")).joined(trace_of(parts=("b", "c")))

    assert joined.parts == ("a", "b", "c")
    assert [step.part for step in joined.steps] == [0, 1, 0, 1, 2, 1]
    with pytest.raises(InvalidInput):
        joined.joined(trace_of(num_experts=7))


def test_steps_are_selected_by_part_and_phase() -> None:
    trace = trace_of(rows=(2, 2, 2, 2))

    assert [step.phase for step in trace.steps] == ["prefill", "decode", "mixed", "prefill"]
    assert trace.selected(["b"], ["decode"]) == [trace.steps[1]]
    with pytest.raises(InvalidInput):
        trace.selected(["z"])
