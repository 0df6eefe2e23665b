"""Runs of a generating request: what workers are asked for, with grammar and unwanted words as tokens."""

import json
import secrets
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from moesaic.errors import InvalidInput
from moesaic.json_texts import JsonRoom, decode_text
from moesaic.models.text.dialects.rules import BLANKS, MAX_CHARACTERS, schema_text
from moesaic.models.text.schemas.binding import Binder, TooLong
from moesaic.models.text.schemas.reading import SchemaReader
from moesaic.services.gateway.fields.generating import MAX_ANSWERS, GenerationWire, wrapped
from moesaic.services.gateway.fields.truncating import kept_tokens
from moesaic.services.gateway.gateway import Admitted
from moesaic.services.gateway.language import Language
from moesaic.services.gateway.workers.run import Run
from moesaic.v1.attention_pb2 import Generation, Grammar, Word

ANY_OBJECT = '{"type": "object"}'
# Where the answer goes out as a whole and its text decides nothing, a worker need not tell each token.
WHOLE_ANSWER_PATIENCE_MS = 250


class AskedGrammar(NamedTuple):
    """The grammar of a request, and the schema keywords that it leaves out."""

    grammar: Grammar | None
    unenforced: list[str]


def grammar_of(body: GenerationWire) -> AskedGrammar:
    """Find the grammar that a request asks for, if any.

    Raises:
        InvalidInput: there are several, it is very long, or a strict schema has a keyword that no grammar can enforce.
    """
    unenforced: list[str] = []
    wanted = [*_of_response_format(body, unenforced), *_of_structured_outputs(body, unenforced)]
    wanted += [*_of_guided(body, unenforced), *_of_others(body, unenforced)]
    if len(wanted) > 1:
        fix = f"cannot be combined with {wanted[0].field}"
        raise InvalidInput(wanted[1].field, fix)
    return AskedGrammar(bounded(wanted[0]) if wanted else None, unenforced)


def check_strict(field: str, keywords: Set[str], *, strict: bool) -> None:
    """Check that a grammar can enforce all keywords of a strict schema.

    Raises:
        InvalidInput: it cannot.
    """
    if strict and keywords:
        names = ", ".join(sorted(keywords))
        fix = f"no grammar can enforce {names}: leave {names} out, or send strict false"
        raise InvalidInput(field, fix, code="unsupported_parameter")


def names_of(field: str, keywords: Set[str]) -> list[str]:
    """Write the keywords of a field as entries of ``x-moesaic-ignored``."""
    return [f"{field}: {keyword}" for keyword in sorted(keywords)]


def bounded(grammar: Grammar) -> Grammar:
    """Give a grammar back.

    Raises:
        InvalidInput: it is very long.
    """
    if grammar.ByteSize() > MAX_CHARACTERS:
        raise too_long(grammar.field)
    return grammar


def too_long(field: str) -> InvalidInput:
    """Make the error of a field whose grammar is very long."""
    return InvalidInput(field, f"must take at most {MAX_CHARACTERS} characters")


def _of_response_format(body: GenerationWire, unenforced: list[str]) -> list[Grammar]:
    asked, field = body.response_format, "response_format"
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Grammar(json_schema=_text(ANY_OBJECT, field, unenforced), field=field)]
    if asked.json_schema is None:
        raise InvalidInput(f"{field}.json_schema", "is required with this type")
    told = asked.json_schema
    schema = ANY_OBJECT if told.schema_ is None else told.schema_
    text = _text(schema, field, unenforced, strict=bool(told.strict))
    return [Grammar(json_schema=text, field=field)]


def _of_structured_outputs(body: GenerationWire, unenforced: list[str]) -> list[Grammar]:
    asked = body.structured_outputs
    if asked is None:
        return []
    return _grammars(
        "structured_outputs.",
        unenforced,
        ANY_OBJECT if asked.json_ is None and asked.json_object else asked.json_,
        asked.regex,
        asked.grammar,
        asked.choice,
    )


def _of_guided(body: GenerationWire, unenforced: list[str]) -> list[Grammar]:
    return _grammars(
        "guided_",
        unenforced,
        body.guided_json,
        body.guided_regex,
        body.guided_grammar,
        body.guided_choice,
    )


def _of_others(body: GenerationWire, unenforced: list[str]) -> list[Grammar]:
    """Read the names of SGLang and llama.cpp."""
    schema, field = body.json_schema, "json_schema"
    given = {
        field: None if schema is None else _text(schema, field, unenforced),
        "regex": body.regex,
        "ebnf": body.ebnf,
        "grammar": body.grammar,
    }
    kinds = {"ebnf": "grammar"}
    return [
        Grammar(**{kinds.get(name, name): text}, field=name)
        for name, text in given.items()
        if text is not None
    ]


def _grammars(
    prefix: str,
    unenforced: list[str],
    schema: Any,
    regex: str | None,
    grammar: str | None,
    choice: list[str] | None,
) -> list[Grammar]:
    wanted = []
    if schema is not None:
        field = f"{prefix}json"
        wanted.append(Grammar(json_schema=_text(schema, field, unenforced), field=field))
    if regex is not None:
        wanted.append(Grammar(regex=regex, field=f"{prefix}regex"))
    if grammar is not None:
        wanted.append(Grammar(grammar=grammar, field=f"{prefix}grammar"))
    if choice is not None:
        wanted.append(Grammar(choice=json.dumps(choice), field=f"{prefix}choice"))
    return wanted


def _text(
    schema: str | bool | dict[str, Any], field: str, unenforced: list[str], *, strict: bool = False
) -> str:
    """Write a schema as text, as a grammar takes it; a worker refuses invalid schemas.

    Raises:
        InvalidInput: it is very long, nested too deeply, or strict with a keyword that no grammar can enforce.
    """
    if isinstance(schema, str):
        if len(schema) > MAX_CHARACTERS:
            raise too_long(field)
        try:
            schema = decode_text(schema, field, JsonRoom())
        except ValueError:
            return str(schema)
    if not isinstance(schema, dict):
        return schema_text(schema)
    binder = Binder(SchemaReader(schema))
    try:
        document = binder.document(schema)
    except TooLong:
        raise too_long(field) from None
    check_strict(field, binder.unenforced, strict=strict)
    unenforced += names_of(field, binder.unenforced)
    blanks = schema.get("x-guidance", BLANKS)
    return schema_text(
        {"x-guidance": blanks, **document} if isinstance(document, dict) else document
    )


async def bad_words_of(language: Language, words: Sequence[str] | None) -> list[Word]:
    """Encode each word as it begins a text and, where that takes other tokens, as it follows a space."""
    if not words:
        return []
    return await language.work(sum(map(len, words)), _encode, language, words)


def _encode(language: Language, words: Sequence[str]) -> list[Word]:
    encode = language.tokenizer.encode
    ways = [way for word in words for way in (word, f" {word.lstrip()}")]
    found = dict.fromkeys(tuple(encode(way, add_special_tokens=False)) for way in ways)
    return [Word(token_ids=token_ids) for token_ids in found if token_ids]


@dataclass(frozen=True)
class AnswerLimits:
    """Bounds of an answer's length."""

    max_model_tokens: int  # prompt and answer together
    max_tokens: int | None  # as asked for
    default_max_tokens: int | None  # None: all that fit
    field: str = "max_tokens"  # where the caller asked

    @property
    def bound(self) -> int:
        """Most tokens of an answer if they do not depend on the prompt, else 0."""
        return self.max_tokens if self.max_tokens is not None else self.default_max_tokens or 0

    def of(self, prompt: Sequence[int], field: str) -> int:
        """Find the most tokens of the answer to a prompt.

        Raises:
            InvalidInput: the prompt is empty, or leaves no room.
        """
        if not prompt:
            raise InvalidInput(field, "must not be empty")
        room = self.max_model_tokens - len(prompt)
        # LiteLLM and others know by OpenAI's words that a context is too small.
        fits = f"this model's maximum context length is {self.max_model_tokens} tokens, with the answer"
        if room < (1 if self.max_tokens is None else min(1, self.max_tokens)):
            fix = f"{fits}; the prompt has {len(prompt)}: shorten it"
            raise InvalidInput(field, fix, code="context_length_exceeded")
        if self.max_tokens is None:
            return min(room, self.default_max_tokens or room)
        if self.max_tokens > room:
            fix = f"must be at most {room}, got {self.max_tokens}: {fits}, and the prompt has {len(prompt)}"
            raise InvalidInput(self.field, fix, code="context_length_exceeded")
        return self.max_tokens


def limits_of(
    admitted: Admitted[GenerationWire], default_max_tokens: int | None = None
) -> AnswerLimits:
    """Find the bounds of a request's answers; ``default_max_tokens`` is the route's own, None: all that fit."""
    gateway, body = admitted.gateway, admitted.body
    defaults = (default_max_tokens, gateway.defaults.max_tokens)
    default = min((most for most in defaults if most is not None), default=None)
    return AnswerLimits(gateway.max_tokens, body.answer_tokens, default, body.answer_tokens_field)


def kept_of(
    admitted: Admitted[GenerationWire], default_max_tokens: int | None = None
) -> int | None:
    """Tell how many of a prompt's last tokens a request keeps; None: all.

    Raises:
        InvalidInput: it asks to keep more than the context.
    """
    limits = limits_of(admitted, default_max_tokens)
    room = limits.bound if limits.max_tokens is not None else max(1, limits.bound)
    asked = admitted.body.truncate_prompt_tokens
    return kept_tokens(asked, limits.max_model_tokens, room)


class LogprobCounts(NamedTuple):
    """Likeliest tokens to tell beside each token; None: nothing is told, not even of the token itself."""

    of_answer: int | None
    of_prompt: int | None


def runs_of(
    admitted: Admitted[GenerationWire],
    prompts: Sequence[Sequence[int]],
    field: str,
    limits: AnswerLimits,
    logprobs: LogprobCounts,
    bad_words: Sequence[Word],
    grammar: Grammar | None,
) -> list[Run]:
    """Make the runs of a request, prompt by prompt, ``n`` each.

    Args:
        admitted: the request.
        prompts: token ids of each prompt.
        field: field of the body that the prompts are from.
        limits: bounds of each answer's length.
        logprobs: counts of log-probabilities to tell.
        bad_words: tokens of the words that no answer may have.
        grammar: of the answers.

    Raises:
        InvalidInput: a prompt does not fit, or the fields contradict each other.
    """
    body, terms = admitted.body, admitted.terms
    _check_grammar(body, grammar)
    # A seed of the gateway's own, where the caller gave none, lets another worker go on where one was lost.
    drawn = body.seed is None
    seed = secrets.randbits(63) if body.seed is None else body.seed
    if len(prompts) * body.n > MAX_ANSWERS:
        fix = f"{len(prompts)} prompts with {body.n} answers each are over {MAX_ANSWERS}"
        raise InvalidInput("n", f"{fix}: ask for fewer at once")
    # One for all: there may be thousands of runs, and it may name a whole vocabulary.
    work = Generation(
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        sampling=body.sampling(seed, bad_words, admitted.gateway.defaults),
        top_logprobs=logprobs.of_answer,
        prompt_logprobs=logprobs.of_prompt,
        grammar=grammar,
        patience_ms=0 if body.stream or body.stops else WHOLE_ANSWER_PATIENCE_MS,
    )
    runs: list[Run] = []
    for i, prompt in enumerate(prompts):
        max_tokens = limits.of(prompt, field if len(prompts) == 1 else f"{field}[{i}]")
        if body.min_tokens > max_tokens:
            fix = f"must be at most max_tokens ({max_tokens}), got {body.min_tokens}"
            raise InvalidInput("min_tokens", fix)
        # With a caller's seed, equal prompts have equal answers. Without one, every answer is an independent draw.
        first = seed + (len(runs) if drawn else 0)
        runs += [
            Run(prompt, work, terms, max_tokens=max_tokens, seed=wrapped(first + k))
            for k in range(body.n)
        ]
    return runs


def _check_grammar(body: GenerationWire, grammar: Grammar | None) -> None:
    if grammar is not None and body.min_tokens:
        raise InvalidInput("min_tokens", f"cannot be combined with {grammar.field}")
    if grammar is not None and body.allowed_token_ids:
        raise InvalidInput("allowed_token_ids", f"cannot be combined with {grammar.field}")
