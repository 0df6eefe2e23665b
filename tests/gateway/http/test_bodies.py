"""What a body may hold is counted before it is decoded, and only what is no text counts."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic import json_texts
from moesaic.errors import InvalidInput
from moesaic.json_texts import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_NESTED,
    MAX_TEXTS,
    MAX_VALUES,
    JsonRoom,
    decode_text,
)
from moesaic.services.gateway.routes.json_route import InvalidJson, decode_body

TEXT = 'a, b: [c] {d} "e" \\ \\" \N{GRINNING FACE}\n'


def test_text_may_have_any_number_of_marks_in_it() -> None:
    body = {"prompt": TEXT * 50_000, "stop": [TEXT] * 1000}

    for content in (json.dumps(body), json.dumps(body, ensure_ascii=False)):
        assert decode_body(content.encode()) == body


@pytest.mark.parametrize(
    "content",
    [
        b"[" + b"[]," * (MAX_NESTED + 1) + b"[]]",
        b"[" * (MAX_NESTED + 1),
        b"[" + b"1.5," * (MAX_NESTED + 1) + b"1]",
        b"[" + b"1E5," * (MAX_NESTED + 1) + b"1]",
        b"[" + b'"a",' * (MAX_TEXTS + 1) + b"1]",
        b'{"a": 1' + b"0" * MAX_DIGITS + b"}",
        b"[" + b"{}," * (MAX_NESTED + 1) + b"1]",
        b"[" + b"1," * (MAX_VALUES + 1) + b"1]",
        b'{"a": [' + b'"\\"",' * (MAX_VALUES + 1) + b"1]}",
        b"{" + b",".join(b'"%d":1' % i for i in range(MAX_NESTED + 1)) + b"}",
        b'{"a\\\\": [' + b"[]," * (MAX_NESTED + 1) + b'"\\\\"]}',
    ],
)
def test_more_than_may_be_held_is_refused_before_it_is_decoded(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_texts, "from_json", lambda _: pytest.fail("decoded"))

    with pytest.raises(InvalidInput, match=f"body: may hold at most {MAX_VALUES} values"):
        decode_body(content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab",:[]{}\\', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text('a",[\\'), inner, max_size=4)
    ),
    max_leaves=25,
)


@given(JSON, st.integers(0, 30), st.integers(1, 9))
def test_a_body_is_refused_exactly_if_it_holds_more(value: object, most: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_texts, "MAX_NESTED", most)
        patch.setattr(json_texts, "_PIECE_BYTES", piece)
        content = json.dumps(value).encode()

        if _num_nested(value) <= most:
            assert decode_body(content) == value
        else:
            with pytest.raises(InvalidInput):
                decode_body(content)


def _num_nested(value: object) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_num_nested, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_num_nested, value))
    return 0


def test_only_utf_8_is_json_here() -> None:
    assert decode_body(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    with pytest.raises(InvalidJson, match="it is not UTF-8"):
        decode_body('{"a": "\xe4"}'.encode("utf-16"))


NESTED = [b"[", b'{"b":', b'[{"b":']
WHERE = [
    '{"tools": %s',
    '{"a": 1,\n "tools": %s',
    '{"a": ["\\"[{"], "tools": [{"function": {"parameters": %s',
]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("step", NESTED)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 970, 20_000])
def test_what_is_nested_too_deeply_is_refused_by_its_field(
    where: str, step: bytes, depth: int
) -> None:
    with pytest.raises(
        InvalidInput, match=f"must not be nested more than {MAX_DEPTH} deep"
    ) as told:
        decode_body(where.encode() % (step * depth))

    assert told.value.field == "tools"


def test_as_deep_as_may_be_is_taken() -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH

    assert decode_body(b'{"a": %s}' % text.encode()) == {"a": json.loads(text)}
    assert decode_text(text, "a", JsonRoom()) == json.loads(text)
    with pytest.raises(InvalidInput, match="a: must not be nested"):
        decode_text(f"[[{text}]]", "a", JsonRoom())
    with pytest.raises(ValueError, match="expected value"):
        decode_text("[" * 20 + "}", "a", JsonRoom())


@given(
    st.lists(st.sampled_from([b"\n", b" ", b'"a",', b'"\xc3\xa4",\n', b"{},"]), max_size=30),
    st.integers(1, 9),
)
def test_the_place_of_half_a_surrogate_pair_is_found(before: list[bytes], piece: int) -> None:
    num_items = sum(b"," in part for part in before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_texts, "_PIECE_BYTES", piece)
        with pytest.raises(InvalidInput) as told:
            decode_body(b'{"a": [' + b"".join(before) + b'"b\\ud800"]}')

    assert told.value.field == f"a[{num_items}]"
