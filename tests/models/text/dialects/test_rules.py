"""Grammars of calls: whatever ``llguidance`` lets through is read as calls that fit their schemas."""

import json
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from moesaic.engine.sequences.grammar_trial import compiled, load_tokenizer
from moesaic.models.text.dialects.dialect import NOTHING, Dialect, Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Part
from tests.models.text.dialects.examples import ANSWERS, FUNCTIONS, NOW, dialect, read

pytest.importorskip("llguidance")

DEMO = Path(__file__).parents[4] / "models/demo/tokenizer.json"
END = 2
MOST = 200  # tokens
TAGGED = ("<function", "</function", "<parameter", "</parameter", "<invoke", "</invoke")
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


class Vocabulary:
    """The demo model's tokens, and a family's markers as tokens where it has them."""

    def __init__(self, path: Path, markers: tuple[str, ...]) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(DEMO))
        added = [tokenizers.AddedToken(m, special=i % 2 == 0) for i, m in enumerate(markers)]
        self.tokenizer.add_tokens(added)
        self.tokenizer.save(str(path))
        self.size = self.tokenizer.get_vocab_size()
        self.known = load_tokenizer(path, self.size, [END])
        self.markers = markers

    def token_id(self, text: str) -> int | None:
        found: int | None = self.tokenizer.token_to_id(text) if text in self.markers else None
        return found

    def spoken(self, grammar: str, rng: random.Random) -> str | None:
        """Draw an answer that the grammar lets through; None: it takes too many tokens."""
        matcher = compiled(self.known, "grammar", grammar)
        taken: list[int] = []
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            bits = f"{int.from_bytes(mask, 'little'):b}"[::-1][: self.size]
            allowed = [found.start() for found in re.finditer("1", bits)]
            rare = [i for i in allowed if i == END or i >= 4096]
            token = rng.choice(rare if rare and rng.random() < 0.3 else allowed)
            if token == END:
                break
            matcher.consume_token(token)
            taken.append(token)
            if len(taken) == MOST:
                return None
        return str(self.tokenizer.decode(taken, skip_special_tokens=False))

    def takes(self, grammar: str, text: str) -> bool:
        """True if the text is a whole answer by the grammar."""
        matcher = compiled(self.known, "grammar", grammar)
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            mask = matcher.compute_bitmask()
            if not mask[token >> 3] >> (token & 7) & 1:
                return False
            matcher.consume_token(token)
        return bool(matcher.compute_bitmask()[END >> 3] >> (END & 7) & 1)


@pytest.fixture(params=ANSWERS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def vocabulary(form: str, tmp_path: Path) -> Vocabulary:
    markers = dialect(form).markers(Wanted(FUNCTIONS))
    return Vocabulary(
        tmp_path / "tokenizer.json", tuple(m for m in markers if not m.startswith(TAGGED))
    )


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
