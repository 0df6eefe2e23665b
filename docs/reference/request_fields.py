"""The page of request fields, made from the types of bodies and the table of refused fields."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from moesaic.services.gateway.app import body_types
from moesaic.services.gateway.fields.bodies import InferenceWire, RequestBody
from moesaic.services.gateway.fields.defaults import FIELDS
from moesaic.services.gateway.fields.generating import SAMPLED, GenerationWire, OnWire
from moesaic.services.gateway.fields.known import ONLY_KNOWN, REFUSED, WITHIN, Refusal

INTRODUCTION = """\
A field of a body is of one of three kinds. `null` means the same as no field, unless the table says `not null` or the
field is required.

- **Taken**: the fields in the tables of the routes. Types are strict, and a value out of bounds is refused with 400.
- **Refused**: fields of other servers that would change the answer and are not supported here. They get 400 and the
  code `unsupported_parameter`, except for values that change nothing.
- **Ignored**: every other field. It changes nothing, and the header `x-moesaic-ignored` of the answer names it.
"""
SHARED: Mapping[str, type[BaseModel]] = {
    "All inference routes": InferenceWire,
    "Generation": GenerationWire,
}
BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "≥ {} characters",
    "maxLength": "≤ {} characters",
    "minItems": "≥ {} items",
    "maxItems": "≤ {} items",
    "maxProperties": "≤ {} members",
}


def request_fields_page(made: str) -> str:
    """Make the page; ``made`` is its second paragraph, which names the command."""
    bodies = dict(sorted(body_types()))
    lines = ["# Request fields", "", made, "", INTRODUCTION]
    objects: dict[str, Any] = {}
    above: set[str] = set()
    for title, kind in SHARED.items():
        lines += [f"## {title}", "", *_fields_of(kind, above, objects)]
        above |= kind.model_fields.keys()
    paths_of: dict[type[BaseModel], list[str]] = {}
    for path, kind in bodies.items():
        paths_of.setdefault(kind, []).append(f"`{path}`")
    for kind, paths in paths_of.items():
        bases = {t: base for t, base in SHARED.items() if issubclass(kind, base)}
        taken = {name for base in bases.values() for name in base.model_fields}
        lines += [f"## {', '.join(paths)}", ""]
        if bases:
            lines += [f"The fields of {' and of '.join(map(_link, bases))}, and these:", ""]
        lines += _fields_of(kind, taken, objects)
        if elsewhere := _elsewhere(kind):
            lines += [*elsewhere, ""]
        if kind.model_config.get("extra") == "forbid":
            lines += ["Every other field is refused.", ""]
    lines += ["## Objects", ""]
    for name, schema in sorted(objects.items()):
        lines += [f"### {name}", "", *_table(schema, (), {})]
    return "\n".join([*lines, *_refused(bodies)]).rstrip() + "\n"


def _elsewhere(kind: type[BaseModel]) -> list[str]:
    """List the fields of other routes that this body refuses, by what to use instead."""
    names_of: dict[str, list[str]] = {}
    for name, instead in sorted(_elsewhere_of(kind).items()):
        names_of.setdefault(instead, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {instead} |" for instead, names in sorted(names_of.items())]
    return ["| refused here | instead |", "|---|---|", *rows] if rows else []


def _link(title: str) -> str:
    return f"[{title.lower()}](#{title.lower().replace(' ', '-')})"


def _fields_of(kind: type[BaseModel], but: Collection[str], objects: dict[str, Any]) -> list[str]:
    """Write the table of a body's own fields, and add the types of nested objects to ``objects``."""
    schema = kind.model_json_schema()
    objects |= schema.pop("$defs", {})
    sampled = SAMPLED if issubclass(kind, GenerationWire) else {}
    return _table(schema, but, sampled)


def _table(schema: Any, but: Collection[str], sampled: Mapping[str, OnWire]) -> list[str]:
    required = schema.get("required", ())
    lines = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for name, told in schema.get("properties", {}).items():
        if name in but:
            continue
        value = _type_of(told)
        if name in required:
            default = "required"
        else:
            default = _default(name, told, sampled)
            value += "" if {"type": "null"} in told.get("anyOf", ()) else ", not null"
        lines.append(f"| `{name}` | {value} | {default} | {_cell(told.get('description', ''))} |")
    return [*lines, ""]


def _default(name: str, schema: Any, sampled: Mapping[str, OnWire]) -> str:
    value = sampled[name].neutral if name in sampled else schema.get("default")
    if not isinstance(value, str | int | float):
        return ""
    before = "the model's own, else " if name in FIELDS and name in sampled else ""
    return f"{before}`{json.dumps(value)}`"


def _type_of(schema: Any) -> str:
    """Write a type in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            kinds = [_type_of(one) for one in schema[key] if one != {"type": "null"}]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{value}`" for value in values)
    kind = schema.get("type", "any value")
    if kind == "array":
        kind = f"list of {_type_of(schema.get('items', {}))}"
    elif "properties" in schema:
        return f"`{_shape(schema)}`"
    elif isinstance(values := schema.get("additionalProperties"), dict) and values:
        kind = f"map to {_type_of(values)}"
    bounds = [text.format(_number(schema[key])) for key, text in BOUNDS.items() if key in schema]
    return _cell(kind) + (f" ({_cell(', '.join(bounds))})" if bounds else "")


def _shape(schema: Any) -> str:
    """Write an object as its JSON looks."""
    if "properties" in schema:
        inner = (f'"{name}": {_shape(one)}' for name, one in schema["properties"].items())
        return "{" + ", ".join(inner) + "}"
    if "items" in schema:
        return f"[{_shape(schema['items'])}, …]"
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    return " or ".join(map(json.dumps, values)) or str(schema["type"])


def _number(value: float) -> str:
    """Write a bound; the large ones are powers of two."""
    whole = int(value)
    small = abs(whole) < 1 << 20 or whole != value
    return (
        f"{value:.12g}" if small else f"{'-' if whole < 0 else ''}2^{abs(whole).bit_length() - 1}"
    )


def _refused(bodies: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    yield from (
        "## Refused",
        "",
        "The last column names the routes that take a field; all others refuse it. `best_of` may be equal to `n`.",
        "",
    )
    yield from _refusals(
        (name, refusal, [path for path, kind in bodies.items() if _takes(kind, name)])
        for name, refusal in sorted(REFUSED.items())
    )
    yield from ("Within objects:", "")
    yield from _refusals(
        (f"{place}.{name}", refusal, ())
        for place, within in sorted(WITHIN.items())
        for name, refusal in sorted(within.items())
    )
    names = " and ".join(f"`{name}`" for name in sorted(ONLY_KNOWN))
    yield f"In {names} every field that is not listed is refused."


def _takes(kind: type[BaseModel], name: str) -> bool:
    return name in kind.model_fields and name not in _elsewhere_of(kind)


def _elsewhere_of(kind: type[BaseModel]) -> Mapping[str, str]:
    return kind.elsewhere() if issubclass(kind, RequestBody) else {}


def _refusals(rows: Iterable[tuple[str, Refusal, Sequence[str]]]) -> Iterator[str]:
    yield from ("| field | instead | changes nothing | taken by |", "|---|---|---|---|")
    for name, refusal, paths in rows:
        neutral = " ".join(f"`{json.dumps(value)}`" for value in refusal.neutral)
        taken = " ".join(f"`{path}`" for path in paths)
        yield f"| `{name}` | {_cell(refusal.instead)} | {neutral} | {taken} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
