"""Answers that must fit a grammar, sampled from a real model at temperature 1."""

import asyncio
import json
import os
import re
import shutil
import signal
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.engine import Engine
from moesaic.engine.sequences import grammar
from moesaic.engine.sequences.grammar import GrammarCompiler
from moesaic.engine.sequences.grammar_trial import GrammarTrial
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    Request,
    RequestKey,
    Sampling,
    TokenEvent,
)
from moesaic.engine.steps.admission import EngineLimits
from moesaic.errors import InvalidInput, NotReady
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.text.tokenizer import Tokenizer
from moesaic.models.weights.checkpoint import Checkpoint
from tests.processes import children

TRIAL = "moesaic.engine.sequences.grammar_trial"
DIRECTORY = Path(__file__).parents[3] / "models" / "demo"
LIMITS = EngineLimits(
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_num_queued_reqs=64,
    max_num_queued_tokens=8192,
    max_model_len=1024,
)


class Writer:
    """The demo model, answering several requests at once."""

    def __init__(self) -> None:
        self.config, self.tokenizer = load_config(DIRECTORY), Tokenizer.load(DIRECTORY)
        parts = Checkpoint(DIRECTORY), self.config, torch.float32, torch.device("cpu")
        self._decoder, self._dispatcher = Decoder.load(*parts), LocalDispatcher(*parts)
        self.compiler = GrammarCompiler(
            DIRECTORY, self.config.vocab_size, self.config.eos_token_ids
        )

    def write(self, *grammars: tuple[str, str], seed: int = 0, **more: Any) -> list[list[int]]:
        """The tokens of one answer a grammar; each of them ends by itself."""
        compiled = [self.compiler.compile(kind, text, "grammar") for kind, text in grammars]  # type: ignore[arg-type]
        prompt = more.pop("prompt", self.tokenizer.encode("An answer:"))
        asked = [
            GenerationTask(
                max_tokens=600,
                stop_token_ids=frozenset(self.config.eos_token_ids),
                sampling=Sampling(temperature=1.0, seed=seed + i),
                grammar=grammar,
                **more,
            )
            for i, grammar in enumerate(compiled)
        ]
        return asyncio.run(self._run(prompt, asked))

    async def _run(self, prompt: list[int], asked: list[GenerationTask]) -> list[list[int]]:
        events: list[Event] = []
        engine = Engine(self._decoder, self._dispatcher, LIMITS, 512, events.extend, 5.0)
        running = asyncio.create_task(engine.run())
        for i, task in enumerate(asked):
            engine.submit(Request(RequestKey(str(i)), tuple(prompt), task))
        while sum(isinstance(e, FinishEvent | FailureEvent) for e in events) < len(asked):
            await asyncio.sleep(0)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        ends = [e for e in events if isinstance(e, FinishEvent | FailureEvent)]
        assert all(isinstance(e, FinishEvent) and e.reason == "stop" for e in ends), ends
        told = [e for e in events if isinstance(e, TokenEvent)]
        return [[e.token_id for e in told if e.key.request_id == str(i)] for i in range(len(asked))]

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


NAME = st.text('abcxyz_é "\\/', min_size=1, max_size=6)
LEAF = st.one_of(
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 12)),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 1000),
    ),
    st.just({"type": "boolean"}),
    st.builds(lambda values: {"enum": values}, st.lists(NAME, min_size=1, max_size=3)),
)
SCHEMA = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
            st.dictionaries(NAME, inner, max_size=3),
        ),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most},
            inner,
            st.integers(0, 3),
        ),
    ),
    max_leaves=5,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "array":
            return len(value) <= schema["maxItems"] and all(fits(v, schema["items"]) for v in value)
    return sorted(value) == sorted(schema["required"]) and all(
        fits(value[name], inner) for name, inner in schema["properties"].items()
    )


@given(st.lists(SCHEMA, min_size=4, max_size=8), st.integers(0, 1000))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_an_answer_is_json_that_fits_its_schema(
    writer: Writer, schemas: list[dict[str, Any]], seed: int
) -> None:
    compact = [{**schema, "x-guidance": {"whitespace_flexible": False}} for schema in schemas]

    answers = writer.write(*(("json_schema", json.dumps(s)) for s in compact), seed=seed)

    for schema, tokens in zip(schemas, answers, strict=True):
        assert fits(json.loads(writer.text(tokens)), schema)


def test_other_grammars_are_followed_too(writer: Writer) -> None:
    lark = 'start: greeting " " /[a-z]{3,5}/ "!"\ngreeting: "hello" | "bye"'
    gbnf = 'root ::= "x" [0-9] "y"'

    date, choice, greeted, numbered = (
        writer.text(tokens)
        for tokens in writer.write(
            ("regex", r"[12]\d{3}-[01]\d"),
            ("choice", '["ja, \\"gern\\"", "nein"]'),
            ("grammar", lark),
            ("grammar", gbnf),
        )
    )

    assert re.fullmatch(r"[12]\d{3}-[01]\d", date)
    assert choice in ('ja, "gern"', "nein")
    assert re.fullmatch("(hello|bye) [a-z]{3,5}!", greeted)
    assert re.fullmatch("x[0-9]y", numbered)


def test_a_structured_answer_goes_on_elsewhere_with_the_same_tokens(writer: Writer) -> None:
    grammar = ("regex", "[a-z]{20}")
    prompt = writer.tokenizer.encode("An answer:")
    [whole] = writer.write(grammar, seed=3)
    half = len(whole) // 2

    [rest] = writer.write(grammar, seed=3, prompt=prompt + whole[:half], num_resumed=half)

    assert whole[:half] + rest == whole


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", '{"type": '),
        ("regex", "(a"),
        ("grammar", "start: missing"),
        ("grammar", "root ::= ("),
        ("choice", "not a list"),
    ],
)
def test_what_is_no_grammar_is_refused_by_its_field(writer: Writer, kind: Any, text: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        writer.compiler.compile(kind, text, "guided_thing")

    assert refusal.value.field == "guided_thing"
    assert "\n" not in str(refusal.value)


def test_without_the_package_the_request_is_refused_and_the_package_named(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)

    with pytest.raises(InvalidInput, match="llguidance") as refusal:
        writer.compiler.compile("regex", "never compiled before", "guided_regex")

    assert refusal.value.code == "unsupported_parameter"


def hostile(number: int = 0) -> dict[str, tuple[Any, str]]:
    """Grammars that crash a process, take long to compile, or take long at each token."""
    chain = "".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1}\n' for i in range(5000))
    names = [f"T{i}" for i in range(600)]
    lexemes = "".join(
        f"{name}: /[^{chr(97 + i % 26)}]*[a-z]{{0,{i}}}/\n" for i, name in enumerate(names)
    )
    return {
        "crashes": ("grammar", f'start: r0\n{chain}r5000: "c"\n// {number}'),
        "slow": ("grammar", f"start: ({' | '.join(names)})+\n{lexemes}// {number}"),
    }


@pytest.mark.parametrize("name", ["crashes", "slow"])
def test_a_hostile_grammar_is_refused_by_its_field_and_harms_nobody(
    writer: Writer, name: str
) -> None:
    kind, text = hostile()[name]

    for _ in range(2):  # the second time it is known
        # On a fast machine the compiler meets its own bound before ours on time.
        with pytest.raises(InvalidInput, match=r"make it smaller|too many expressions") as refusal:
            writer.compiler.compile(kind, text, "guided_grammar")
        assert refusal.value.field == "guided_grammar"

    [said] = writer.write(("regex", "[0-9]{3}"))
    assert re.fullmatch("[0-9]{3}", writer.text(said))


@pytest.mark.parametrize("depth", [300, 20_000])  # the library quotes it four times
def test_a_refusal_tells_the_reason_and_not_the_grammar(writer: Writer, depth: int) -> None:
    with pytest.raises(InvalidInput) as refusal:
        writer.compiler.compile("regex", "(" * depth + "a" + ")" * depth, "guided_regex")
    assert "nested parentheses" in str(refusal.value)
    assert "((((" not in str(refusal.value)


def sources_tried(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """What is compiled from now on, and not found among what is kept."""
    tried: list[tuple[Any, str]] = []
    try_out = GrammarTrial.try_out

    def noted(trial: GrammarTrial, kind: Any, text: str) -> int:
        tried.append((kind, text))
        return try_out(trial, kind, text)

    monkeypatch.setattr(GrammarTrial, "try_out", noted)
    return tried


def make_compiler() -> GrammarCompiler:
    config = load_config(DIRECTORY)
    return GrammarCompiler(DIRECTORY, config.vocab_size, config.eos_token_ids)


async def test_grammars_are_compiled_beside_the_loop_and_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = make_compiler()
    tried = sources_tried(monkeypatch)
    ways: list[tuple[Any, str]] = [("regex", "a+"), ("regex", "b+"), ("regex", "b+")]

    asked = [compiler.compile_beside(*way, "guided_regex") for way in ways]
    compiled = await asyncio.gather(*asked)

    assert [one.matcher().failure for one in compiled] == ["", "", ""]
    assert sorted(tried) == ways[:2]


@pytest.mark.parametrize("source", [("regex", "(a"), ("json_schema", "{}")])
async def test_a_trial_that_was_stopped_is_no_verdict(source: tuple[Any, str]) -> None:
    compiler, before = make_compiler(), children(TRIAL)
    compiler.compile("regex", "first", "guided")
    [helper] = children(TRIAL) - before
    os.kill(helper, signal.SIGSTOP)

    with pytest.raises(NotReady) as failure:
        await compiler.compile_beside(*source, "guided")

    assert (failure.value.http_status, failure.value.retry_after_s) == (503, 1.0)
    expected = pytest.raises(InvalidInput) if "(" in source[1] else nullcontext()
    with expected:  # the verdict, by a new helper
        await compiler.compile_beside(*source, "guided")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_whoever_ends_helpers_gets_no_good_grammar_refused(number: int) -> None:
    compiler, before = make_compiler(), children(TRIAL)
    ended = 0
    for i in range(12):
        if i % 3 == 0:
            for helper in children(TRIAL) - before:
                os.kill(helper, number)  # and the next trial may find it dying
                ended += 1
        with suppress(NotReady):
            compiler.compile("regex", f"a{{{i}}}b", "guided")

    assert ended
    assert compiler.compile("regex", "a{0}b", "guided").matcher().failure == ""


def test_one_tenant_s_grammars_do_not_drive_out_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "KEPT_BYTES", 4 << 20)
    compiler = make_compiler()
    compiler.compile("regex", "mine", "guided", "modest")

    for number in range(1, 9):
        compiler.compile("regex", f"a{{{number}}}", "guided", "flood")

    tried = sources_tried(monkeypatch)
    compiler.compile("regex", "mine", "guided", "modest")
    assert tried == []


def test_a_worker_without_what_it_needs_says_so_and_keeps_no_verdict(tmp_path: Path) -> None:
    config = load_config(DIRECTORY)
    compiler = GrammarCompiler(tmp_path, config.vocab_size, config.eos_token_ids)
    with pytest.raises(InvalidInput, match="cannot read the tokenizer"):
        compiler.compile("regex", "a", "guided")

    shutil.copy(DIRECTORY / "tokenizer.json", tmp_path)

    assert compiler.compile("regex", "a", "guided").matcher().failure == ""


def test_what_is_kept_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "KEPT_BYTES", 3 << 20)
    compiler = make_compiler()

    def ask(number: int) -> None:
        with pytest.raises(InvalidInput):
            compiler.compile("regex", "(" * number, "guided_regex")
        compiler.compile("regex", f"a{{{number}}}", "guided_regex")

    for number in range(1, 6):
        ask(number)
    tried = sources_tried(monkeypatch)
    for number in (5, 4):  # these are the last four sources, of which three find room at most
        ask(number)

    assert ("regex", "a{5}") not in tried
    assert 1 <= len(tried) <= 3


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": "travel"}},
        {"special_tokens_map.json": {"eos_token": {"content": "travel", "lstrip": False}}},
        {"generation_config.json": {"eos_token_id": [2, "travel"]}},
    ],
)
def test_every_end_token_ends_a_structured_answer_and_none_is_within_it(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    word = Tokenizer.load(DIRECTORY).token_to_id("travel")
    assert word is not None
    named = json.dumps(files).replace('[2, "travel"]', f"[2, {word}]")
    # the hub's cache has links
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).symlink_to(DIRECTORY / name)
    for name, content in json.loads(named).items():
        (tmp_path / name).write_text(json.dumps(content))
    config = load_config(tmp_path)
    assert word in config.eos_token_ids
    compiler = GrammarCompiler(tmp_path, config.vocab_size, config.eos_token_ids)
    matcher = compiler.compile("json_schema", '{"type": "string"}', "guided").matcher()
    quote = Tokenizer.load(tmp_path).encode('"', add_special_tokens=False)

    def may_come() -> set[int]:
        mask = matcher.mask()
        return {i for i in (*config.eos_token_ids, *quote) if mask[i // 8] >> i % 8 & 1}

    matcher.follow(quote)
    assert may_come() == set(quote)
    matcher.follow(quote * 2)
    assert may_come() == set(config.eos_token_ids)
