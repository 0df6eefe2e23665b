import json

import pytest

from moesaic.cli.clients.streams import text_pieces
from moesaic.cli.terminal.outcome import CommandError


def event(value: object) -> str:
    return f"data: {json.dumps(value)}"


def chat(content: str | None, finish: str | None = None) -> str:
    return event({"choices": [{"delta": {"content": content}, "finish_reason": finish}]})


def test_the_text_of_a_chat_is_put_together() -> None:
    lines = [
        event({"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}]}),
        ": keep-alive",
        "",
        chat("Hel"),
        chat("lo"),
        chat(None, "stop"),
        event({"choices": [], "usage": {}}),
        "data: [DONE]",
    ]

    assert list(text_pieces(lines)) == ["Hel", "lo"]


def test_the_text_of_a_completion_is_put_together() -> None:
    lines = [
        event({"choices": [{"text": " and", "finish_reason": None}]}),
        event({"choices": [{"text": " so", "finish_reason": "length"}]}),
    ]

    assert list(text_pieces(lines)) == [" and", " so"]


def test_reasoning_is_told_apart() -> None:
    def thought(text: str) -> str:
        return event({"choices": [{"delta": {"reasoning": text}, "finish_reason": None}]})

    thoughts: list[str] = []
    lines = [thought("Hm"), thought("m."), chat("Yes"), chat("!", "stop")]

    assert list(text_pieces(lines, thoughts.append)) == ["Yes", "!"]
    assert thoughts == ["Hm", "m.", "\n"]


def test_an_error_event_ends_the_command() -> None:
    lines = [chat("Hel"), event({"error": {"message": "worker lost"}})]

    with pytest.raises(CommandError, match="worker lost"):
        list(text_pieces(lines))


def test_a_stream_that_just_ends_is_no_answer() -> None:
    with pytest.raises(CommandError, match="before the answer was complete"):
        list(text_pieces([chat("Hel")]))
