import json

import pytest

from moesaic.batch.requests import BadLine
from moesaic.batch.results import (
    ResultTally,
    RouteAnswer,
    answered,
    decode_result,
    refused,
    unanswered,
)


def test_a_result_has_the_four_fields_of_a_batch_output() -> None:
    result = answered("a", RouteAnswer(200, "req-1", {"x": [1]}))

    value = json.loads(result.encode())

    assert value.pop("id").startswith("batch_req_")
    assert value == {
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req-1", "body": {"x": [1]}},
        "error": None,
    }
    assert decode_result(result.encode()) == result


def test_a_bad_line_says_where_it_is() -> None:
    value = json.loads(refused(BadLine(7, None, "invalid_json_line", "not JSON")).encode())

    assert (value["custom_id"], value["response"]) == (None, None)
    assert value["error"] == {"code": "invalid_json_line", "message": "not JSON", "line": 7}


@pytest.mark.parametrize("line", [b"", b"{}\n", b'{"id": "x"', b"\0\0\0\n"])
def test_what_is_no_result_is_not_taken_for_one(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_result(line)


def test_only_good_answers_count_as_completed_and_their_usage_is_added_up() -> None:
    tally = ResultTally()
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }

    for result in (
        answered("a", RouteAnswer(200, "r", {"usage": usage})),
        answered("b", RouteAnswer(200, "r", {"usage": usage})),
        answered("c", RouteAnswer(200, "r", "whatever")),
        answered("d", RouteAnswer(400, "r", {"usage": usage})),
        unanswered("e", "batch_expired", "too late"),
    ):
        tally.add(result)

    assert tally == ResultTally(3, 2, 10, 8, 4)
