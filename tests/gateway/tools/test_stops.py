"""Stop strings are searched in the content of answers, not in thoughts or calls."""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.models.text.dialects.detection import dialect_of
from moesaic.models.text.dialects.dialect import Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Part
from moesaic.services.gateway.generate.answers import Ending, GrowingChoice, Piece
from moesaic.services.gateway.generate.speech import Speech
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.tools.conftest import ASKED, FAMILIES
from tests.gateway.tools.test_answers import BODY, PATH, SAID, accumulated, events

THOUGHT = "Question: is it? aQ"
CONTENT = "uestion: Yes.\nQuestion: no"
THINKS: dict[str, str] = {
    "hermes": f"<think>{THOUGHT}</think>{CONTENT}",
    "deepseek": f"{THOUGHT}</think>{CONTENT}",
    "harmony": f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant"
    f"<|channel|>final<|message|>{CONTENT}",
}
EVERY_STOP = [
    "Question:",
    "aQuestion",
    "Qu",
    "\n",
    "ion: ",
    "no",
    "is it",
    "</think>",
    "Paris",
    "I ",
]
every_family = pytest.mark.parametrize("family", THINKS)


class Texts:
    """A decoder of tokens, each of which is the index of a text."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[token_id] for token_id in token_ids)

    def flush(self) -> str:
        return ""


def speech_of(family: str, *, tools: bool) -> Speech:
    functions = [ToolFunction("get_weather"), ToolFunction("now")] if tools else []
    opened: Literal["open", "free"] = "open" if family == "deepseek" else "free"
    return Speech(dialect_of(FAMILIES[family].template, "auto", "auto"), Wanted(functions), opened)


def grown(
    speech: Speech, text: str, cuts: Sequence[int], ending: Ending, batch: int = 1
) -> tuple[list[Part], list[Piece]]:
    """Return the parts of an answer in tokens with these cuts, neighbours of one kind joined, and the pieces."""
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    tokens = [text[a:b] for a, b in itertools.pairwise(bounds)]
    choice = GrowingChoice(0, Texts(tokens), ending, speech.reader())
    pieces: list[Piece] = []
    for start in range(0, len(tokens), batch):
        if choice.finished:
            break
        ids = range(start, min(start + batch, len(tokens)))
        pieces.append(choice.feed(pb.Tokens(token_ids=ids)))
    if not choice.finished:
        pieces.append(choice.finish(pb.Finished(reason=pb.FINISH_REASON_STOP)))
    parts: list[Part] = []
    for part in (part for piece in pieces for part in piece.parts):
        if parts and parts[-1].kind == part.kind != "call":
            parts[-1] = Part(part.kind, parts[-1].text + part.text)
        else:
            parts.append(part)
    return parts, pieces


def stopped(parts: Sequence[Part], stops: Sequence[str], include: bool) -> tuple[list[Part], str]:
    """Cut parts at the stop string that is complete first, and is the longest of several."""
    shown: list[Part] = []
    for kind, text, call_id in parts:
        for end in range(len(text) + 1) if kind == "content" else ():
            hits = [stop for stop in stops if text[:end].endswith(stop)]
            if hits:
                hit = max(hits, key=len)
                cut = text[: end if include else end - len(hit)]
                return shown + ([Part("content", cut)] if cut else []), hit
        shown.append(Part(kind, text, call_id))
    return shown, ""


@every_family
@pytest.mark.parametrize("tools", [False, True])
@given(
    stops=st.lists(st.sampled_from(EVERY_STOP), max_size=3),
    include=st.booleans(),
    cuts=st.lists(st.integers(0, 300), max_size=40),
    batch=st.integers(1, 5),
    calls=st.booleans(),
)
def test_stop_strings_end_only_content_in_every_cut(
    family: str,
    tools: bool,
    stops: list[str],
    include: bool,
    cuts: list[int],
    batch: int,
    calls: bool,
) -> None:
    text = SAID[family] if calls else THINKS[family]
    if family == "deepseek":
        text = text.removeprefix("<think>")
    speech = speech_of(family, tools=tools)
    whole, _ = grown(speech, text, [], Ending())

    told, pieces = grown(speech, text, cuts, Ending(stops, include_stop=include), batch)

    expected, hit = stopped(whole, stops, include)
    assert told == expected
    assert (pieces[-1].stop_reason or "") == hit
    assert pieces[-1].finish_reason is not None
    assert all(piece.finish_reason is None for piece in pieces[:-1])


@every_family
@pytest.mark.parametrize(
    ("stop", "include", "content"),
    [
        ("Question:", False, "uestion: Yes.\n"),
        ("Question:", True, "uestion: Yes.\nQuestion:"),
        ("aQuestion", False, CONTENT),
        (["is it", "Yes"], False, "uestion: "),
        ("assistant", False, CONTENT),
    ],
)
async def test_stop_strings_are_not_searched_in_thoughts(
    open_house, scripts, family: str, stop: Any, include: bool, content: str
) -> None:
    body = {"messages": ASKED, "chat_template_kwargs": {"thinking": True}, "n": 2}
    body |= {"stop": stop, "include_stop_str_in_output": include}
    async with open_house(scripts.says(THINKS[family])) as house:
        choices = (await house.client.post(PATH, json=body)).json()["choices"]
        stream = events((await house.client.post(PATH, json={**body, "stream": True})).text)

    for choice in choices:
        assert choice["message"]["reasoning"] == THOUGHT
        assert choice["message"]["content"] == content
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == (None if content == CONTENT else as_told(stop))
        index = choice["index"]
        own = [{"choices": [c for c in e["choices"] if c["index"] == index]} for e in stream]
        message = accumulated(own)
        assert (message["reasoning"], message["content"]) == (THOUGHT, content)


def as_told(stop: str | list[str]) -> str:
    return stop if isinstance(stop, str) else stop[-1]


@pytest.mark.parametrize("family", SAID)
async def test_stop_strings_are_not_searched_in_calls(open_house, scripts, family: str) -> None:
    async with open_house(scripts.says(SAID[family])) as house:
        body = {**BODY, "stop": ["Paris", "city", "now", "it asks"]}
        [choice] = (await house.client.post(PATH, json=body)).json()["choices"]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    arguments = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    assert arguments == ['{"city": "Paris"}', "{}"]


async def test_stop_strings_are_searched_in_text_that_only_resembles_a_call(
    open_house, scripts
) -> None:
    async with open_house(scripts.says("Write <tool_call>get_weather</tool_call> here.")) as house:
        body = {**BODY, "stop": "get_weather"}
        [choice] = (await house.client.post(PATH, json=body)).json()["choices"]

    assert choice["stop_reason"] == "get_weather"
    assert choice["message"]["content"] == "Write <tool_call>"


async def test_stop_strings_are_searched_in_thoughts_that_are_not_split_off(
    open_house, scripts
) -> None:
    async with open_house(scripts.says(THINKS["hermes"])) as house:
        body = {"prompt": "a", "max_tokens": 200, "stop": "Question:"}
        [choice] = (await house.client.post("/v1/completions", json=body)).json()["choices"]

    assert (choice["text"], choice["stop_reason"]) == ("<think>", "Question:")
