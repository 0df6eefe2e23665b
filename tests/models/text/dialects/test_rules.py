"""Grammars of calls: whatever ``llguidance`` lets through is read as calls that fit their schemas."""

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moesaic.models.text.dialects.dialect import NOTHING, Dialect, Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Part
from tests.models.text.dialects.examples import ANSWERS, FUNCTIONS, NOW, dialect, read
from tests.models.text.dialects.vocabulary import Vocabularies, Vocabulary

pytest.importorskip("llguidance")

UNIT = {"type": "string", "enum": ["celsius", "kelvin"]}
SMALL = ToolFunction(
    "get_weather",
    {
        "type": "object",
        "properties": {"unit": UNIT, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["unit"],
    },
    strict=True,
)
CALLED = (SMALL, NOW)


@pytest.fixture(params=ANSWERS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def vocabulary(form: str, vocabularies: Vocabularies) -> Vocabulary:
    return vocabularies.of(form)


def calls_in(parts: list[Part]) -> list[tuple[str, Any]]:
    return [
        (part.text, json.loads(after.text))
        for part, after in pairwise(parts)
        if part.kind == "call"
    ]


def fits(name: str, arguments: Any) -> bool:
    if name == "now":
        return bool(arguments == {})
    return (
        name == "get_weather"
        and arguments["unit"] in UNIT["enum"]
        and arguments.keys() <= {"unit", "days"}
        and 1 <= arguments.get("days", 1) <= 9
    )


@pytest.mark.parametrize("opened", ["free", "open", "closed"])
@pytest.mark.parametrize("many", [True, False])
def test_an_answer_that_must_call_has_calls_that_fit(
    form: str, vocabulary: Vocabulary, opened, many: bool
) -> None:
    wanted = Wanted(CALLED, needed=True, bound=True, many=many)
    spoken = dialect(form)
    grammar = spoken.grammar(vocabulary.token_id, opened, wanted, None)
    assert grammar is not None
    rng = random.Random(f"{form} {opened} {many}")
    answers = [vocabulary.spoken(grammar, rng) for _ in range(3)]

    told = [read(spoken, a, wanted, opened) for a in answers if a is not None]
    assert told
    for parts in told:
        calls = calls_in(parts)
        assert calls
        assert len(calls) == 1 or many
        assert all(fits(*call) for call in calls)
        assert not [p for p in parts if p.kind == "content"] or form == "harmony"


def test_an_answer_that_may_call_is_bound_from_the_first_marker_on(
    form: str, vocabulary: Vocabulary
) -> None:
    wanted = Wanted(CALLED, bound=True)
    spoken = dialect(form)
    grammar = spoken.grammar(vocabulary.token_id, "closed", wanted, None)
    assert grammar is not None
    rng = random.Random(form)
    answers = [vocabulary.spoken(grammar, rng) for _ in range(16)]

    told = [calls_in(read(spoken, a, wanted, "closed")) for a in answers if a is not None]
    assert any(told)
    assert all(fits(*call) for calls in told for call in calls)


def test_the_words_of_the_families_themselves_fit(form: str, vocabulary: Vocabulary) -> None:
    wanted = Wanted(FUNCTIONS, bound=True)
    grammar = dialect(form).grammar(vocabulary.token_id, "free", wanted, None)
    answer = ANSWERS[form]
    if form == "harmony":  # whose call tokens end answers
        answer = answer[: answer.index("<|call|>")]

    assert grammar is not None
    assert vocabulary.takes(grammar, answer)
    assert vocabulary.takes(grammar, "Yes.") or form == "harmony"


def test_a_schema_of_the_answer_lets_reasoning_and_calls_pass(
    form: str, vocabulary: Vocabulary
) -> None:
    spoken = dialect(form)

    def grammar(wanted: Wanted) -> str:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        text = spoken.grammar(vocabulary.token_id, "free", wanted, lambda r: r.value(schema))
        assert text is not None
        return text

    answer = ANSWERS[form]
    thoughts = answer[: answer.index("Let me see.")].removesuffix(
        "<|channel|>commentary<|message|>"
    )
    final = "<|channel|>final<|message|>" if form == "harmony" else ""
    assert vocabulary.takes(grammar(NOTHING), f'{thoughts}{final}{{"a": 1}}')
    assert vocabulary.takes(grammar(Wanted(FUNCTIONS)), f'{thoughts}{final}{{"a": 1}}')
    assert not vocabulary.takes(grammar(NOTHING), f'{thoughts}{final}{{"b": 1}}')
    calls = answer[answer.index("Let me see.") + len("Let me see.") :].strip()
    if form != "harmony":
        assert vocabulary.takes(grammar(Wanted(FUNCTIONS)), thoughts + calls)


@pytest.mark.parametrize("spell", [str, str.strip])
def test_markers_that_are_no_tokens_bind_too(tmp_path: Path, spell: Callable[[str], str]) -> None:
    vocabulary = Vocabulary(tmp_path / "tokenizer.json", ())
    spoken = dialect("hermes")
    grammar = spoken.grammar(vocabulary.token_id, "free", Wanted(FUNCTIONS, bound=True), None)
    assert grammar is not None

    assert vocabulary.takes(grammar, spell(ANSWERS["hermes"]))
    assert not vocabulary.takes(grammar, ANSWERS["hermes"].replace('"days": 3', '"days": "x"'))


def test_nothing_is_bound_where_nothing_asks_for_it() -> None:
    assert Dialect().grammar(lambda _: None, "closed", NOTHING, None) is None
    assert dialect("hermes").grammar(lambda _: None, "free", Wanted(FUNCTIONS), None) is None


def test_arguments_of_json_have_one_blank_at_most_between_tokens(
    form: str, vocabulary: Vocabulary
) -> None:
    wanted = Wanted(FUNCTIONS, needed=True, bound=True)
    grammar = dialect(form).grammar(vocabulary.token_id, "closed", wanted, None)
    answer = ANSWERS[form]
    calls = answer[answer.index("Let me see.") + len("Let me see.") :].strip()
    if form == "harmony":
        calls = calls[calls.index("<|channel|>") : calls.index("<|call|>")]

    assert grammar is not None
    assert vocabulary.takes(grammar, calls)
    if '"days": 3' in calls:
        for wide in ('"days":  3', '"days":\n 3', '"days": 3  ', '"days": 3\n', '  "days": 3'):
            assert not vocabulary.takes(grammar, calls.replace('"days": 3', wide))
