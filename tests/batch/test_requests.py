import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.batch.requests import BadLine, BatchRequest, read_requests

URL = "/v1/chat/completions"


def line(custom_id: Any = "a", **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"x": 1}, **more}


def read(
    *lines: Any, endpoint: str | None = None, max_lines: int | None = None
) -> list[BatchRequest | BadLine]:
    encoded = (v if isinstance(v, bytes) else json.dumps(v).encode() for v in lines)
    return list(read_requests(io.BytesIO(b"\n".join(encoded)), 1000, endpoint, max_lines))


def test_requests_come_in_the_order_of_their_lines() -> None:
    found = read(line("a"), b"", line("b"), b"  ")

    assert found == [
        BatchRequest(1, "a", URL, b'{"x": 1}'),
        BatchRequest(3, "b", URL, b'{"x": 1}'),
    ]


@pytest.mark.parametrize(
    ("value", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b"[" * 900, "invalid_json_line", None),
        (b'"\\ud800x"', "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        ({}, "missing_required_parameter", "custom_id"),
        (line(7), "invalid_custom_id", "custom_id"),
        (line(""), "invalid_custom_id", "custom_id"),
        (line("i" * 513), "invalid_custom_id", "custom_id"),
        ({"custom_id": "a", "url": URL, "body": {}}, "missing_required_parameter", "method"),
        (line(method="GET"), "invalid_method", "method"),
        ({"custom_id": "a", "method": "POST", "body": {}}, "missing_required_parameter", "url"),
        (line(url="http://elsewhere/v1/models"), "invalid_url", "url"),
        (line(url="//elsewhere/v1/models"), "invalid_url", "url"),
        (line(url="/v1/completions\n"), "invalid_url", "url"),
        (line(url="/v1/completions"), "mismatched_endpoint", "url"),
        (line(body="text"), "invalid_body", "body"),
        (line(body={"stream": True}), "unsupported_parameter", "body.stream"),
        (line(body={"stream": [[]]}), "unsupported_parameter", "body.stream"),
        (line(body=None), "missing_required_parameter", "body"),
        (line([[]]), "invalid_custom_id", "custom_id"),
        (b'{"custom_id": "\\ud800"}', "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None),
        (b'{"custom_id": "a", "method": 7}}', "invalid_json_line", None),
        (line(body={"x": "y" * 2000}), "line_too_long", None),
    ],
)
def test_a_bad_line_is_named_and_the_next_one_is_read(value: Any, code: str, param: Any) -> None:
    bad, good = read(value, line("good"), endpoint=URL)

    assert isinstance(bad, BadLine)
    assert (bad.number, bad.code, bad.param) == (1, code, param)
    assert good == BatchRequest(2, "good", URL, b'{"x": 1}')


def test_the_second_of_two_lines_with_the_same_id_is_the_bad_one() -> None:
    first, second = read(line("a"), line("a"))

    assert isinstance(first, BatchRequest)
    assert isinstance(second, BadLine)
    assert (second.number, second.custom_id, second.code) == (2, "a", "duplicate_custom_id")


def test_a_body_stays_as_it_was_written() -> None:
    body = b'{ "x" : 1e999, "y":"\xc3\xbc\xff\\u00fc", "z": %s, "stream": null }' % (b"9" * 5000)
    whole = b'{"custom_id":"a","method":"POST","url":"%s","body": %s }\r' % (URL.encode(), body)

    [request] = read_requests(io.BytesIO(whole), 10_000)

    assert request == BatchRequest(1, "a", URL, body)


def test_behind_too_many_lines_nothing_is_read() -> None:
    found = read(line("a"), b"", b"", line("b"), b"{", max_lines=3)

    assert [(one.number, one.custom_id) for one in found] == [(1, "a"), (4, None)]
    assert isinstance(found[1], BadLine)
    assert (found[1].code, read(line("a"), b"", b"", max_lines=3)[1:]) == ("too_many_lines", [])


def test_a_byte_order_mark_is_passed_over() -> None:
    [request] = read(b"\xef\xbb\xbf" + json.dumps(line("a")).encode())

    assert request.custom_id == "a"


@given(st.lists(st.binary(max_size=30) | st.just(json.dumps(line()).encode())), st.integers(1, 200))
def test_every_line_that_is_not_blank_is_told_of_once(lines: list[bytes], longest: int) -> None:
    content = b"\n".join(lines)

    found = list(read_requests(io.BytesIO(content), longest))

    whole = content.split(b"\n")
    numbers = [line.number for line in found]
    assert numbers == sorted(set(numbers))
    unread = {n for n in range(1, len(whole) + 1)} - set(numbers)
    assert all(not whole[n - 1].removeprefix(b"\xef\xbb\xbf").strip() for n in unread)
    ids = [line.custom_id for line in found if isinstance(line, BatchRequest)]
    assert len(ids) == len(set(ids))
