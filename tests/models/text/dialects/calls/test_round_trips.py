"""Calls in the form of templates, for each kind of schema: they are read back, and the grammar allows them."""

import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import pytest

from moesaic.models.text.chat import ChatTemplate
from moesaic.models.text.dialects.dialect import Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from tests.models.text.dialects.calls.kinds import KINDS, parameters_of
from tests.models.text.dialects.calls.templates import TEMPLATES
from tests.models.text.dialects.examples import dialect, joined, read
from tests.models.text.dialects.vocabulary import Vocabularies, Vocabulary

pytest.importorskip("llguidance")

CASES = [
    (name, kind, number)
    for name in TEMPLATES
    for kind, (_, values) in KINDS.items()
    for number in range(len(values))
]
BOUND = [(name, kind) for name in TEMPLATES for kind in KINDS]
SAMPLE = (
    29  # every so many of the cases in make test; a prime, so that all templates and kinds occur
)


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name][1], {})


def function_of(kind: str) -> ToolFunction:
    return ToolFunction("do_it", parameters_of(KINDS[kind][0]), strict=True)


def written(name: str, arguments: dict[str, Any]) -> str:
    """Return the turn that a template writes for a call."""
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "do_it", "arguments": json.dumps(arguments, ensure_ascii=False)},
    }
    messages = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    used = template(name)
    whole = used.write(messages, False, {})
    before = used.write(messages[:1], False, {})
    turn = whole.removeprefix(before).removesuffix("\n").removesuffix("<|im_end|>")
    calls = dialect(TEMPLATES[name][0]).calls
    opening = (*calls.frames, *calls.openings)[0] if calls is not None else " to="
    return turn[turn.index(opening) :]


def cuts(text: str, *, every: bool) -> Iterator[list[str]]:
    yield list(text)
    for at in range(1, len(text)) if every else range(1, len(text), 17):
        yield [text[:at], text[at:]]


def check(name: str, kind: str, number: int, *, every: bool) -> None:
    form = TEMPLATES[name][0]
    value = KINDS[kind][1][number]
    for arguments in ({"value": value}, {"value": value, "other": "<x>\n5"}):
        text, spoken, wanted = written(name, arguments), dialect(form), Wanted((function_of(kind),))
        call, told = read(spoken, text, wanted, "closed")
        assert (call.kind, call.text) == ("call", "do_it")
        assert same(json.loads(told.text), arguments), (text, told.text)
        for pieces in cuts(text, every=every):
            assert read(spoken, pieces, wanted, "closed") == joined([call, told]), pieces


def same(one: Any, other: Any) -> bool:
    """Compare values; booleans are not numbers."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def without_nullable(schema: Any) -> Any:
    """Convert a schema of OpenAPI to JSON Schema."""
    own = {key: value for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [own, {"type": "null"}]} if schema.get("nullable") else schema


def check_grammar(vocabulary: Vocabulary, name: str, kind: str, walks: int) -> None:
    form = TEMPLATES[name][0]
    function, spoken = function_of(kind), dialect(form)
    wanted = Wanted((function,), needed=True, bound=True, many=False)
    unenforced: dict[str, set[str]] = {}
    grammar = spoken.grammar(vocabulary.token_id, "closed", wanted, None, unenforced)
    assert grammar is not None
    assert not unenforced
    for value in KINDS[kind][1]:
        if not any(marker in json.dumps(value) for marker in vocabulary.markers):
            text = written(name, {"value": value, "other": "x"})
            assert vocabulary.takes(grammar, text), text
    checker = jsonschema.Draft202012Validator(parameters_of(without_nullable(KINDS[kind][0])))
    rng = random.Random(f"{name} {kind}")
    for _ in range(walks):
        answer = vocabulary.spoken(grammar, rng)
        if answer is not None:
            parts = read(spoken, answer, wanted, "closed")
            [told] = [part.text for part in parts if part.kind == "arguments"]
            assert not list(checker.iter_errors(json.loads(told))), (answer, told)


@pytest.mark.parametrize(("name", "kind", "number"), CASES[::SAMPLE])
def test_a_call_is_read_as_its_template_wrote_it(name: str, kind: str, number: int) -> None:
    check(name, kind, number, every=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "number"), CASES)
def test_every_call_is_read_as_its_template_wrote_it(name: str, kind: str, number: int) -> None:
    check(name, kind, number, every=True)


@pytest.mark.parametrize(("name", "kind"), BOUND[::SAMPLE])
def test_a_grammar_takes_such_calls_and_only_what_fits(
    vocabularies: Vocabularies, name: str, kind: str
) -> None:
    check_grammar(vocabularies.of(TEMPLATES[name][0]), name, kind, walks=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), BOUND)
def test_every_grammar_takes_such_calls_and_only_what_fits(
    vocabularies: Vocabularies, name: str, kind: str
) -> None:
    check_grammar(vocabularies.of(TEMPLATES[name][0]), name, kind, walks=4)
