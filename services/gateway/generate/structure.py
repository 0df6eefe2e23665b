"""Form of an answer's text: ``response_format``, and other servers' ways to ask for more."""

import json
from collections.abc import Set
from typing import Any, NamedTuple

from moesaic.errors import InvalidInput
from moesaic.json_texts import JsonRoom, decode_text
from moesaic.models.text.dialects.rules import BLANKS, MAX_CHARACTERS, schema_text
from moesaic.models.text.schemas.binding import Binder, TooLong
from moesaic.models.text.schemas.reading import SchemaReader
from moesaic.services.gateway.fields.generating import GenerationWire
from moesaic.v1.attention_pb2 import Grammar

ANY_OBJECT = '{"type": "object"}'


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
