"""Arguments of tool calls, which are JSON within JSON: what they hold together is bounded as a body is."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from moesaic.errors import InvalidInput
from moesaic.json_texts import MAX_NESTED
from moesaic.models.text.call_messages import CallMessages

OBJECTS, TEXTS = CallMessages(objects=True, empty=""), CallMessages(objects=False, empty="")


def conversation(*arguments: str) -> list[Mapping[str, Any]]:
    """Each call in a message of its own."""
    calls = [{"function": {"name": "f", "arguments": each}} for each in arguments]
    return [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":[' + "[]," * MAX_NESTED + "[]]}",
        '{"a":[' + '{"b":{}},' * MAX_NESTED + "[]]}",
        json.dumps({str(i): i for i in range(MAX_NESTED)}),
        '{"a":[' + "1.5," * MAX_NESTED + "1.5]}",
        '{"a":[' + "1," * (1 << 20) + "1]}",
        '{"a":1' + "0" * 5000 + "}",
    ],
)
def test_arguments_that_hold_too_much_are_refused_by_their_field(arguments: str) -> None:
    with pytest.raises(InvalidInput, match="may hold at most") as refusal:
        OBJECTS.of(conversation("{}", arguments))

    assert refusal.value.field == "messages[1].tool_calls[0].function.arguments"
    assert TEXTS.of(conversation(arguments))  # nothing is decoded


def test_all_arguments_of_a_request_have_one_bound() -> None:
    part = '{"a":[' + "[]," * (MAX_NESTED // 10) + "[]]}"

    assert len(OBJECTS.of(conversation(*[part] * 9))) == 9
    with pytest.raises(InvalidInput, match="may hold at most"):
        OBJECTS.of(conversation(*[part] * 11))


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 1', {"a": 1}),
        ('{"a": "Par', {"a": "Par"}),
        ('{"a": [1, {"b": 2', {"a": [1, {"b": 2}]}),
        ('{"a": 1, "b', {"a": 1}),
        ("{", {}),
        ("", {}),
        (" null ", {}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ("[1", {"arguments": "[1"}),
        ("5", {"arguments": "5"}),
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
        ("{'a': 1}", {"arguments": "{'a': 1}"}),
        ('{"a": "\ud800"}', {"arguments": '{"a": "\ud800"}'}),
    ],
)
def test_the_readable_part_of_broken_arguments_is_given(arguments: str, given: Any) -> None:
    [message] = OBJECTS.of(conversation(arguments))
    [as_text] = TEXTS.of(conversation(arguments))

    assert message["tool_calls"][0]["function"]["arguments"] == given
    assert as_text["tool_calls"][0]["function"]["arguments"] == arguments


def test_broken_arguments_are_held_to_the_same_bounds() -> None:
    for broken in ('{"a":[' + "[]," * MAX_NESTED, '{"a":' * 300):
        with pytest.raises(InvalidInput, match=r"may hold at most|nested more than"):
            OBJECTS.of(conversation(broken))
