import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import CheckpointError
from moesaic.models.configuration.fields import read_text
from moesaic.models.configuration.strict_json import parse_object

KEYS = st.text(max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_objects_are_read_as_they_were_written(value: dict[str, Any]) -> None:
    assert parse_object(json.dumps(value).encode(), "x.json") == value
    assert parse_object(json.dumps(value, ensure_ascii=False).encode(), "x.json") == value


@given(st.dictionaries(KEYS, JSON, min_size=1, max_size=3), st.lists(KEYS, max_size=3), st.data())
def test_a_key_that_comes_twice_is_named_with_its_path(
    value: dict[str, Any], around: list[str], data: st.DataObject
) -> None:
    again = data.draw(st.sampled_from(sorted(value)))
    text = f"{json.dumps(value)[:-1]}, {json.dumps(again)}: {json.dumps(data.draw(JSON))}}}"
    for key in reversed(around):
        text = f"{{{json.dumps(key)}: [{text}]}}"
    path = ".".join([*(part for key in around for part in (key, "0")), again])

    with pytest.raises(CheckpointError) as caught:
        parse_object(text.encode(), "x.json", "its part: ")

    assert str(caught.value) == f"x.json: its part: has the key {path} twice: leave one out"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'{"a": 1} {}', "is not valid JSON"),
        (b'{"\xff": 1}', "is not valid JSON: 'utf-8' codec"),
        (b'\xef\xbb\xbf{"a": 1}', "is not valid JSON: Unexpected UTF-8 BOM"),
        ('{"a": 1}'.encode("utf-16"), "is not valid JSON"),
        (b'{"\\ud800": 1}', "is not valid JSON: 'utf-8' codec"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
        (b'{"a":' * 100_000, "is nested too deep"),
        (b'{"a":' + b"[" * 100_000, "is nested too deep"),
        (b'{"a": {"b": 1, "b": 2}, "a": {}}', "has the key a twice"),
    ],
)
def test_what_is_no_object_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(CheckpointError, match=f"^x.json: {problem}"):
        parse_object(raw, "x.json")


def test_a_text_that_is_not_utf_8_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ \xff }}")

    with pytest.raises(CheckpointError, match=r"chat_template.jinja: is not UTF-8"):
        read_text(tmp_path / "chat_template.jinja")
