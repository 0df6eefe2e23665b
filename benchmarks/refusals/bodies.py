"""Bodies as large as may be, made from the types of requests: each has one field full of one thing.

A new field is covered of itself, as the fields come from the JSON schemas of the types.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

Schema = Mapping[str, Any]
JUNK = ("1", '"a"', "[]", "{}", '{"a":1}', "1.5", "null")
TEXTS = ("a", "\\n", '\\"', "\\u00e4", "[{", "\N{GRINNING FACE}", "<|im_end|>", "a b, ")
FEW = (1, 120)  # items of a list within the items of a list
# Fields that an accepted body needs beside those that its type demands; the first body with a field is its base.
_SCORES = [
    ("queries", "documents"),
    ("text_1", "text_2"),
    ("queries", "items"),
    ("data_1", "data_2"),
]
_CHAT = {"messages": [{"role": "user", "content": "a"}]}
_ONE_TOKEN = {"max_tokens": 1}
VALID: dict[str, list[dict[str, Any]]] = {
    "ChatWire": [_CHAT | _ONE_TOKEN],
    "CompletionWire": [{"prompt": "a"} | _ONE_TOKEN],
    "ClassifyWire": [{"labels": ["yes", "no"]}],
    "ScoreWire": [dict.fromkeys(pair, "a") for pair in _SCORES],
    "TokenizeWire": [{"prompt": "a"}, _CHAT],
}


@dataclass(frozen=True)
class BodyLimits:
    """Bounds of a body."""

    num_bytes: int
    num_values: int
    num_texts: int
    num_nested: int

    def count(self, unit: str) -> int:
        """Count how often a piece of JSON fits, with room for what stands around it."""
        num_nested = sum(map(unit.count, "[{:.")) or 1
        counts = (
            self.num_bytes // (len(unit.encode()) + 1),
            self.num_values // (unit.count(",") + 1),
            self.num_texts // (unit.count('"') // 2 or 1),
            self.num_nested // num_nested if any(map(unit.count, "[{:.")) else self.num_bytes,
        )
        return max(1, min(counts) * 31 // 32)


def large_bodies(kind: type[BaseModel], limits: BodyLimits) -> Iterator[tuple[str, bytes]]:
    """Make large bodies of one type of request.

    Args:
        kind: the type.
        limits: limits of a body.

    Returns:
        Each body as JSON, and its name: the field, and what it is full of.
    """
    schema = kind.model_json_schema()
    writer = _Writer(schema.get("$defs", {}))
    valid = [writer.example(schema) | more for more in VALID.get(kind.__name__, [{}])]
    for name, text in writer.in_object(schema, limits.count, valid):
        yield name, text.encode()


class _Writer:
    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions

    def large(
        self, schema: Schema, count: Callable[[str], int], texts: Sequence[str] = TEXTS
    ) -> Iterator[tuple[str, str]]:
        """Write a value in each form that the schema allows, full of each thing that it may be full of."""
        for form in self._forms(schema):
            kind = form.get("type")
            if kind == "array":
                for name, unit in self._units(form.get("items", {})):
                    for most in {count(unit), min(count(unit), form.get("maxItems", count(unit)))}:
                        yield f"[{most}] of {name}", f"[{','.join([unit] * most)}]"
            elif kind == "object" and form.get("properties"):
                yield from self.in_object(form, count, [self.example(form)], texts)
            elif kind == "object":
                yield from _objects(count)
            elif kind == "string":
                bounded = form.keys() & {"maxLength", "enum", "const"}
                for unit in texts[:1] if bounded else texts:
                    yield f"text of {unit}", f'"{unit * count("a" * len(unit.encode()))}"'
            elif kind is None and not form.keys() & {"const", "enum"}:
                yield from _objects(count)
                for unit in JUNK:
                    yield f"[] of {unit}", f"[{','.join([unit] * count(unit))}]"

    def in_object(
        self,
        schema: Schema,
        count: Callable[[str], int],
        valid: list[dict[str, Any]],
        texts: Sequence[str] = TEXTS,
    ) -> Iterator[tuple[str, str]]:
        """Write an object with one large field, or with many that are not known."""
        for name, field in schema["properties"].items():
            for what, text in self.large(field, count, texts):
                base = next((body for body in valid if name in body), valid[0])
                rest = {other: value for other, value in base.items() if other != name}
                yield f"{name}{_joint(what)}{what}", _with(rest, f"{json.dumps(name)}:{text}")
        yield "unknown fields", _with(valid[0], _pairs(count))

    def example(self, schema: Schema) -> Any:
        """Make a small value that the schema allows."""
        form = next(iter(self._forms(schema)))
        if "const" in form:
            return form["const"]
        if "enum" in form:
            return form["enum"][0]
        kind = form.get("type")
        if kind == "object":
            properties = form.get("properties", {})
            return {name: self.example(properties[name]) for name in form.get("required", ())}
        if kind == "array":
            return [self.example(form["items"])] * form.get("minItems", 1)
        return {"integer": 1, "number": 1, "boolean": True, "null": None}.get(str(kind), "a")

    def _units(self, items: Schema) -> Iterator[tuple[str, str]]:
        """Write items of a list: right ones, wrong ones, and some that are lists themselves or have such."""
        for unit in JUNK:
            yield unit, unit
        for form in self._forms(items):
            if form.get("type") == "object":
                example = self.example(form)
                yield "example", json.dumps(example)
                wrong = {name: [1] for name in form.get("properties", {})}
                yield "wrong", json.dumps(wrong)
        for few in FEW:
            for name, unit in self.large(items, _always(few), TEXTS[:2]):
                yield f"{few} {name}", unit

    def _forms(self, schema: Schema) -> Iterator[Schema]:
        """Go through the forms that a value may have, references followed."""
        if "$ref" in schema:
            yield from self._forms(self._definitions[schema["$ref"].rpartition("/")[2]])
        elif several := schema.get("anyOf") or schema.get("oneOf"):
            for one in several:
                yield from self._forms(one)
        else:
            yield schema


def _always(count: int) -> Callable[[str], int]:
    return lambda unit: count


def _objects(count: Callable[[str], int]) -> Iterator[tuple[str, str]]:
    yield "object", f"{{{_pairs(count)}}}"


def _pairs(count: Callable[[str], int]) -> str:
    return ",".join(f'"x{i}":1' for i in range(count('"x00000":1')))


def _with(fields: Mapping[str, Any], more: str) -> str:
    return f"{json.dumps(fields)[:-1]}{',' if fields else ''}{more}}}"


def _joint(what: str) -> str:
    return "" if what.startswith("[") else ": " if what.startswith(("text", "object")) else "."
