"""Headers of safetensors files: what the format's own library refuses is refused here, and duplicates besides."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from moesaic.errors import CheckpointError
from moesaic.models.weights.files import list_tensors
from moesaic.models.weights.header import Header, read_header

BITS = {"F4": 4, "F6_E3M2": 6, "BOOL": 8, "F8_E5M2": 8, "BF16": 16, "F32": 32, "C64": 64, "U64": 64}


class Pairs(list[tuple[str, Any]]):
    """The pairs of one JSON object as they are to be written, also when a key comes twice."""

    def written(self) -> str:
        pairs = (f"{json.dumps(key)}:{written(value)}" for key, value in self)
        return "{" + ",".join(pairs) + "}"


def written(value: Any) -> str:
    if isinstance(value, list) and not isinstance(value, Pairs):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, MinusZero):
        return "-0"
    return value.written() if isinstance(value, Pairs) else json.dumps(value)


def entry(start: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> Pairs:
    sizes = [end - start] if shape is None else shape
    return Pairs([("dtype", dtype), ("shape", sizes), ("data_offsets", [start, end])])


def file_of(header: Pairs | bytes, payload: int) -> bytes:
    raw = header if isinstance(header, bytes) else header.written().encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(payload)


def header_of(directory: Path, content: bytes) -> Header:
    path = directory / "model.safetensors"
    path.write_bytes(content)
    return read_header(path)


@st.composite
def good_headers(draw: st.DrawFn) -> tuple[Pairs, int]:
    header, end = Pairs(), 0
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        if math.prod(shape) * BITS[dtype] % 8:
            shape.append(4)
        start, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header.append((f"tensor {number}", entry(start, end, dtype, shape)))
    if draw(st.booleans()):
        told = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
        header.append(("__metadata__", Pairs(told.items())))
    return Pairs(draw(st.permutations(header))), end


class MinusZero(int):
    """Is written as no library writes 0."""


SIZES = (
    st.integers(-1, 40)
    | st.sampled_from([2**32, 2**63, 2**64, 2**64 - 1, MinusZero()])
    | st.sampled_from([1.0, -0.0, 0.0, True])
)


@st.composite
def damaged_headers(draw: st.DrawFn) -> bytes:
    """A header with a fault or two in one of its objects, or none; or more or less payload."""
    header, end = draw(good_headers())
    for _ in range(draw(st.integers(0, 2))):
        objects = [header, *(value for _, value in header if isinstance(value, Pairs))]
        chosen = draw(st.sampled_from(objects))
        if not chosen:
            continue
        at = draw(st.integers(0, len(chosen) - 1))
        key, value = chosen[at]
        match draw(st.sampled_from(["again", "name", "value", "drop", "size"])):
            case "again":
                chosen.append((key, value))
            case "name":
                names = ["dtype", "__metadata__", "tensor 0", "other", "\ud800"]
                chosen[at] = (draw(st.sampled_from(names)), value)
            case "value":
                values = ["U8", "U9", 1, None, [], [0, 8], "a", Pairs()]
                chosen[at] = (key, draw(st.sampled_from(values)))
            case "drop":
                del chosen[at]
            case "size" if isinstance(value, list) and not isinstance(value, Pairs) and value:
                sizes = list(value)
                sizes[draw(st.integers(0, len(sizes) - 1))] = draw(SIZES)
                chosen[at] = (key, sizes)
    return file_of(header, max(0, end + draw(st.sampled_from([0, 0, 0, -1, 1]))))


def repeats(raw: bytes) -> bool:
    found = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    json.loads(raw, object_pairs_hook=look)
    return any(found)


def is_exact(header: dict[str, Any]) -> bool:
    """Tell whether a header has objects with no field too many, where the library takes other forms, too."""
    metadata = header.pop("__metadata__", {})
    exact = all(isinstance(entry, dict) and len(entry) == 3 for entry in header.values())
    return exact and isinstance(metadata, dict)


def knows(content: bytes) -> bool:
    """Ask the format's library."""
    try:
        deserialize(content)
    except SafetensorError:
        return False
    return True


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(good_headers())
def test_every_good_header_is_read(tmp_path: Path, made: tuple[Pairs, int]) -> None:
    header, end = made

    tensors, metadata = header_of(tmp_path, file_of(header, end))

    assert metadata == dict(dict(header).get("__metadata__", ()))
    base = 8 + len(header.written().encode())
    for name, stored in tensors.items():
        told = dict(dict(header)[name])
        assert [stored.start - base, stored.start - base + stored.nbytes] == told["data_offsets"]
        assert (stored.dtype, list(stored.shape)) == (told["dtype"], told["shape"])
    assert tensors.keys() == {name for name, _ in header if name != "__metadata__"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged_headers())
def test_a_header_is_refused_if_the_library_refuses_it_or_a_key_comes_twice(
    tmp_path: Path, content: bytes
) -> None:
    raw = content[8 : 8 + int.from_bytes(content[:8], "little")]

    if not knows(content) or repeats(raw):
        with pytest.raises(CheckpointError, match=r"^model.safetensors: "):
            header_of(tmp_path, content)
    elif is_exact(json.loads(raw)):
        header_of(tmp_path, content)


FOUR = entry(0, 4)


@pytest.mark.parametrize(
    ("header", "payload", "problem"),
    [
        (Pairs([("a", FOUR), ("a", entry(0, 4, "I8"))]), 4, "its header: has the key a twice"),
        (Pairs([("a", FOUR), ("a", FOUR)]), 4, "its header: has the key a twice"),
        (Pairs([("a", Pairs([("dtype", "I8"), *FOUR]))]), 4, "has the key a.dtype twice"),
        (
            Pairs([("__metadata__", Pairs([("b", "1"), ("b", "2")]))]),
            0,
            "has the key __metadata__.b twice",
        ),
        (Pairs([("a", FOUR), ("b", entry(2, 6))]), 6, "tensor b: overlaps tensor a"),
        (Pairs([("a", FOUR), ("b", FOUR)]), 4, "tensor b: overlaps tensor a"),
        (Pairs([("b", entry(5, 8)), ("a", FOUR)]), 8, "tensor b: 1 bytes before it belong to no"),
        (Pairs([("a", entry(4, 8))]), 8, "tensor a: 4 bytes before it belong to no tensor"),
        (Pairs([("a", FOUR)]), 7, "its last 3 bytes belong to no tensor"),
        (Pairs([("a", FOUR)]), 3, "tensor a: is truncated"),
        (Pairs([("a", entry(4, 0, shape=[0]))]), 4, "tensor a: U8 .0. takes 0 bytes"),
        (Pairs([("a", entry(0, 4, "U9"))]), 4, "tensor a: dtype: the format has none"),
        (Pairs([("a", entry(0, 4, "F64", [1]))]), 4, r"tensor a: F64 \[1\] takes 8 bytes"),
        (Pairs([("a", entry(0, 1, "F4", [3]))]), 1, r"tensor a: F4 \[3\] takes 1.5 bytes"),
        (Pairs([("a", entry(0, 0, shape=[2**63, 2, 0]))]), 0, "tensor a: shape: expected sizes"),
        (Pairs([("a", entry(0, 0, shape=[MinusZero()]))]), 0, "tensor a: shape: expected sizes"),
        (Pairs([("a", entry(MinusZero(), 4, shape=[4]))]), 4, "tensor a: data_offsets: expected"),
        (Pairs([("a", Pairs([*FOUR, ("more", 1)]))]), 4, "tensor a: its header entry is malformed"),
        (Pairs([("a", None)]), 0, "tensor a: its header entry is malformed"),
        (Pairs([("__metadata__", Pairs([("a", 1)]))]), 0, "__metadata__: expected texts by name"),
        (b" {}", 0, "its header: expected a JSON object"),
        ("{}".encode("utf-16"), 0, "its header: expected a JSON object"),
        (b"{\xff", 0, "its header: is not valid JSON"),
        (b'{"a":' * 50_000, 0, "its header: is nested too deep"),
    ],
)
def test_damage_is_named(tmp_path: Path, header: Pairs | bytes, payload: int, problem: str) -> None:
    content = file_of(header, payload)

    with pytest.raises(CheckpointError, match=f"^model.safetensors: .*{problem}"):
        header_of(tmp_path, content)


def test_a_file_of_more_than_4_gib_is_read(tmp_path: Path) -> None:
    end = 5_000_000_000
    header = Pairs([("a", entry(0, end - 8)), ("b", entry(end - 8, end))])
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header, 0))
    os.truncate(path, path.stat().st_size + end)  # a hole, which takes no room

    assert read_header(path).tensors["b"].nbytes == 8


def test_an_empty_tensor_may_have_sizes_whose_product_is_large(tmp_path: Path) -> None:
    content = file_of(Pairs([("a", entry(0, 0, shape=[0, 2**63, 2]))]), 0)

    assert knows(content)
    assert header_of(tmp_path, content).tensors["a"].nbytes == 0


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        read_header(tmp_path / "model.safetensors")


def index_of(directory: Path, text: str, **shards: Pairs) -> None:
    (directory / "model.safetensors.index.json").write_text(text)
    for name, header in shards.items():
        (directory / f"{name}.safetensors").write_bytes(file_of(header, 4))


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    text = '{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'
    index_of(tmp_path, text, one=Pairs([("a", FOUR)]), two=Pairs([("a", FOUR)]))

    with pytest.raises(CheckpointError, match=r"index.json: has the key weight_map.a twice"):
        list_tensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    text = '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    both = Pairs([("a", entry(0, 2)), ("b", entry(2, 4))])
    index_of(tmp_path, text, one=Pairs([("a", FOUR)]), two=both)

    with pytest.raises(
        CheckpointError, match=r"two.safetensors: tensor a: contains this tensor, but"
    ):
        list_tensors(tmp_path)


NAMES = [
    *("", ".", "..", "/etc/hostname", "../model.safetensors", "a/b", "a/", "\0", "a\0b"),
    *("x" * 300, "é" * 200, "\n", "deep", "fifo", "model.safetensors.index.json", "nowhere"),
]


@pytest.mark.parametrize("file", NAMES)
def test_an_index_that_names_no_file_of_its_directory_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "deep").mkdir()
    os.mkfifo(tmp_path / "fifo")
    index_of(tmp_path, json.dumps({"weight_map": {"a": file}}))

    with pytest.raises(CheckpointError, match=r"tensor a: |is truncated or not safetensors"):
        list_tensors(tmp_path)


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([*NAMES, "one.safetensors"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(["a", "b", ""]), ANY_JSON) | ANY_JSON)
def test_any_index_is_read_or_refused(tmp_path: Path, weight_map: Any) -> None:
    index_of(tmp_path, json.dumps({"weight_map": weight_map}), one=Pairs([("a", FOUR)]))

    if weight_map == {"a": "one.safetensors"}:
        assert set(list_tensors(tmp_path)) == {"a"}
        return
    with pytest.raises(CheckpointError) as refused:
        list_tensors(tmp_path)
    assert refused.value.file in ("one.safetensors", "model.safetensors.index.json", *NAMES)
