"""Form of an answer's text: ``response_format``, and other servers' ways to ask for more."""

import json
from typing import Any

from moesaic.errors import InvalidInput
from moesaic.json_texts import JsonRoom, decode_text
from moesaic.models.text.dialects.rules import schema_text
from moesaic.services.gateway.fields.generating import GenerationWire
from moesaic.v1.attention_pb2 import Grammar

MAX_GRAMMAR_CHARS = 200_000
ANY_OBJECT = '{"type": "object"}'


def grammar_of(body: GenerationWire) -> Grammar | None:
    """Find the grammar that a request asks for, if any.

    Raises:
        InvalidInput: the request asks for several, or for a very long one.
    """
    wanted = [*_of_response_format(body), *_of_structured_outputs(body)]
    wanted += [*_of_guided(body), *_of_others(body)]
    if len(wanted) > 1:
        fix = f"cannot be combined with {wanted[0].field}"
        raise InvalidInput(wanted[1].field, fix)
    return bounded(wanted[0]) if wanted else None


def bounded(grammar: Grammar) -> Grammar:
    """Give a grammar back.

    Raises:
        InvalidInput: it is very long.
    """
    if grammar.ByteSize() > MAX_GRAMMAR_CHARS:
        raise _too_long(grammar.field)
    return grammar


def _too_long(field: str) -> InvalidInput:
    return InvalidInput(field, f"must take at most {MAX_GRAMMAR_CHARS} characters")


def _of_response_format(body: GenerationWire) -> list[Grammar]:
    asked, field = body.response_format, "response_format"
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Grammar(json_schema=_text(ANY_OBJECT, field), field=field)]
    if asked.json_schema is None:
        raise InvalidInput(f"{field}.json_schema", "is required with this type")
    schema = asked.json_schema.schema_
    return [
        Grammar(json_schema=_text(ANY_OBJECT if schema is None else schema, field), field=field)
    ]


def _of_structured_outputs(body: GenerationWire) -> list[Grammar]:
    asked = body.structured_outputs
    if asked is None:
        return []
    return _grammars(
        "structured_outputs.",
        ANY_OBJECT if asked.json_ is None and asked.json_object else asked.json_,
        asked.regex,
        asked.grammar,
        asked.choice,
    )


def _of_guided(body: GenerationWire) -> list[Grammar]:
    return _grammars(
        "guided_", body.guided_json, body.guided_regex, body.guided_grammar, body.guided_choice
    )


def _of_others(body: GenerationWire) -> list[Grammar]:
    """Read the names of SGLang and llama.cpp."""
    given = {
        "json_schema": None if body.json_schema is None else _text(body.json_schema, "json_schema"),
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
    prefix: str, schema: Any, regex: str | None, grammar: str | None, choice: list[str] | None
) -> list[Grammar]:
    wanted = []
    if schema is not None:
        field = f"{prefix}json"
        wanted.append(Grammar(json_schema=_text(schema, field), field=field))
    if regex is not None:
        wanted.append(Grammar(regex=regex, field=f"{prefix}regex"))
    if grammar is not None:
        wanted.append(Grammar(grammar=grammar, field=f"{prefix}grammar"))
    if choice is not None:
        wanted.append(Grammar(choice=json.dumps(choice), field=f"{prefix}choice"))
    return wanted


def _text(schema: str | bool | dict[str, Any], field: str) -> str:
    """Write a schema as text, without a way to write blanks for ever; a worker refuses one that is no schema.

    Raises:
        InvalidInput: it is very long, or nested too deeply.
    """
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR_CHARS:
            raise _too_long(field)
        try:
            schema = decode_text(schema, field, JsonRoom())
        except ValueError:
            return str(schema)
    return schema_text(schema)
