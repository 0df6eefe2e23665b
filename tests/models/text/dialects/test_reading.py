"""Reading answers: what families write, what models get wrong, and text in any pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.models.text.dialects.dialect import NOTHING, Dialect, Wanted
from moesaic.models.text.dialects.reader import Part
from tests.models.text.dialects.examples import ANSWERS, FUNCTIONS, dialect, read

ONE = Wanted(FUNCTIONS, many=False)


@pytest.mark.parametrize("form", ANSWERS)
def test_reasoning_words_and_calls_of_a_family_are_told_apart(form: str) -> None:
    parts = read(dialect(form), ANSWERS[form])

    told = [(part.kind, part.text) for part in parts]
    assert told[:2] == [("reasoning", "The user asks."), ("content", "Let me see.")]
    assert [text for kind, text in told if kind == "call"] == ["get_weather", "now"]
    arguments = [json.loads(text) for kind, text in told[2:] if kind == "arguments"]
    assert arguments == [{"city": "Paris", "days": 3}, {}]
    assert len(told) == 6


@pytest.mark.parametrize("form", ANSWERS)
def test_without_functions_only_the_reasoning_is_set_apart(form: str) -> None:
    parts = read(dialect(form), ANSWERS[form], NOTHING)

    assert {part.kind for part in parts} == {"reasoning", "content"}
    assert "get_weather" in "".join(part.text for part in parts) or form == "harmony"


@pytest.mark.parametrize("form", ANSWERS)
def test_where_one_call_is_wanted_the_first_one_ends_the_answer(form: str) -> None:
    reader = dialect(form).reader(ONE, "free")
    assert reader is not None
    parts: list[Part] = []
    for char in ANSWERS[form]:
        parts += reader.feed(char)
        if reader.done:
            break

    assert reader.done
    assert [part.text for part in parts if part.kind == "call"] == ["get_weather"]


@pytest.mark.parametrize("form", ANSWERS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 11])
def test_a_stream_has_each_character_as_soon_as_it_is_certain(form: str, size: int) -> None:
    answer = ANSWERS[form]
    pieces = [answer[i : i + size] for i in range(0, len(answer), size)]

    assert read(dialect(form), pieces) == read(dialect(form), answer)


def alphabet(form: str) -> list[str]:
    spoken = dialect(form)
    answer = ANSWERS[form]
    words = [answer[i : i + 7] for i in range(0, len(answer), 7)]
    return [*spoken.markers(Wanted(FUNCTIONS)), *words, *'{}[]":,\\ \n<|>a0', "<function=", '">']


@pytest.mark.parametrize("form", ANSWERS)
@pytest.mark.parametrize("opened", ["free", "open", "closed"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_text_in_any_pieces_is_read_as_the_whole(
    form: str, opened, data: st.DataObject
) -> None:
    words = data.draw(st.lists(st.sampled_from(alphabet(form)), max_size=40))
    text = "".join(words)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    for wanted in (Wanted(FUNCTIONS), ONE, NOTHING):
        whole = read(dialect(form), text, wanted, opened)
        assert read(dialect(form), pieces, wanted, opened) == whole
        assert read(dialect(form), list(text), wanted, opened) == whole


@pytest.mark.parametrize("form", ANSWERS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_an_answer_that_breaks_off_loses_no_word(form: str, data: st.DataObject) -> None:
    answer = ANSWERS[form]
    cut = data.draw(st.integers(0, len(answer)))

    parts = read(dialect(form), answer[:cut])

    seen = "".join(part.text for part in parts)
    for word in ("The user asks.", "Let me see.", "get_weather", "Paris"):
        assert word not in answer[:cut] or word in seen


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call>\nI would call get_weather here."),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "no object"}</tool_call>'),
        ("hermes", 'see <tool_call>{"name": }</tool_call> there'),
        ("hermes", "a < b, and <tool is no marker"),
        ("hermes", "ends in a half <tool_ca"),
        ("hermes", " blanks stay \n\n"),
        ("qwen3_coder", "<tool_call>\nno function\n</tool_call>"),
        ("glm45", "<tool_call> so it is written </tool_call> in words"),
        ("mistral", '[TOOL_CALLS] {"name": 1}'),
        ("mistral_named", "[TOOL_CALLS]now[ARGS] nothing"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now, no arguments"),
        ("kimi_k2", "<|tool_call_begin|>functions.now:0 and no more"),
        ("minimax_m2", '<invoke name="now"> and words'),
        ("harmony", "No channel at all."),
        ("harmony", "<|channel|>no message follows"),
    ],
)
def test_what_is_no_call_is_given_back_as_it_is(form: str, text: str) -> None:
    assert read(dialect(form), list(text)) == [Part("content", text)]


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\\\"}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": [1, {}]}}</tool_call>', None),
        ("mistral_named", '[TOOL_CALLS]f{"a": 1}', '{"a": 1}'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>", "{}"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>", "{}"),
    ],
)
def test_slips_that_leave_no_doubt_are_calls(form: str, text: str, arguments: str | None) -> None:
    call, told = read(dialect(form), list(text))[:2]

    assert call.text == "f"
    assert isinstance(json.loads(told.text), dict)
    assert arguments is None or told.text == arguments


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>delete every"),
        ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nPar"),
    ],
)
def test_arguments_that_break_off_are_no_valid_json(form: str, text: str) -> None:
    call, arguments = read(dialect(form), text)

    assert call.kind == "call"
    with pytest.raises(ValueError, match="line 1"):
        json.loads(arguments.text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", 3),
        ("three", "three"),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("NaN", "NaN"),
        ("[" * 4000, "[" * 4000),
    ],
)
def test_a_value_between_tags_is_json_where_the_schema_has_no_text(value: str, expected) -> None:
    answer = (
        f"<tool_call>get_weather\n<arg_key>days</arg_key><arg_value>{value}</arg_value></tool_call>"
    )

    assert json.loads(read(dialect("glm45"), answer)[1].text) == {"days": expected}


@pytest.mark.parametrize("value", ["3", "null", '{"a": 1}', 'say "hi"\n\\ \t', "\u2028 ü 𝄞"])
def test_a_text_between_tags_stays_one(value: str) -> None:
    answer = f"<function=get_weather><parameter=city>\n{value}\n</parameter></function>"

    assert json.loads(read(dialect("qwen3_coder"), list(answer))[1].text) == {"city": value}


def test_reasoning_that_the_prompt_has_begun_needs_no_tag() -> None:
    spoken = dialect("hermes")

    assert spoken.left_by("<|im_start|>assistant\n<think>\n") == "open"
    assert spoken.left_by("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "closed"
    assert read(spoken, "so\n</think>\n\nyes", opened="open") == [
        Part("reasoning", "so"),
        Part("content", "yes"),
    ]
    assert read(spoken, "so it goes on", opened="open") == [Part("reasoning", "so it goes on")]


def test_a_call_ends_a_reasoning_that_kimi_did_not_close() -> None:
    answer = ANSWERS["kimi_k2"].replace("</think>Let me see.", "")

    kinds = [part.kind for part in read(dialect("kimi_k2"), answer)]
    assert kinds == ["reasoning", "call", "arguments", "call", "arguments"]


def test_a_plain_model_needs_no_reader() -> None:
    assert Dialect().reader(NOTHING, "free") is None
    assert Dialect().reader(Wanted(FUNCTIONS), "free") is None
