"""A page about the API, made of its OpenAPI document alone: no scripts, nothing from other hosts."""

import json
import re
from collections.abc import Iterator
from html import escape
from typing import Any

HEADERS = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
h2 { border-top: 1px solid #ccc; padding-top: 1em; } h3 { margin-bottom: .2em; } p { margin: .3em 0; }
code, td:first-child { font-family: ui-monospace, monospace; font-size: 13px; }
table { border-collapse: collapse; margin: .5em 0; } td { padding: .1em 1em .1em 0; vertical-align: top; }
"""
_BOUNDS = (
    ("minimum", "≥ {:.12g}"),
    ("exclusiveMinimum", "> {:.12g}"),
    ("maximum", "≤ {:.12g}"),
    ("exclusiveMaximum", "&lt; {:.12g}"),
    ("minLength", "≥ {:.12g} characters"),
    ("maxLength", "≤ {:.12g} characters"),
)


def page_of(document: dict[str, Any]) -> str:
    """The page as HTML."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style><h1>{title}</h1>",
            '<p>For programs: <a href="openapi.json">openapi.json</a></p><h2>Routes</h2>',
            *_routes(document["paths"]),
            "<h2>Objects</h2>",
            *_objects(document["components"]["schemas"]),
            "</html>",
        ]
    )


def _routes(paths: dict[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield f"<h3><code>{method.upper()} {escape(path)}</code></h3>"
            yield f"<p>{_prose(operation)}</p>"
            for needed in operation.get("security", ()):
                scopes = ", ".join(*needed.values()) or "any scope"
                yield f"<p>Needs an API key: {escape(scopes)}</p>"
            for media in operation.get("requestBody", {}).get("content", {}).values():
                yield f"<p>Takes {_type_of(media['schema'])}</p>"
            rows = [
                _row(status, _replies(response), _prose(response))
                for status, response in operation["responses"].items()
            ]
            yield f"<table>{''.join(rows)}</table>"


def _replies(response: dict[str, Any]) -> str:
    media = response.get("content", {}).items()
    return "<br>".join(
        f"events with {_type_of(content['itemSchema']['properties']['data'])}"
        if "itemSchema" in content
        else _type_of(content.get("schema", {}), name)
        for name, content in media
    )


def _objects(schemas: dict[str, Any]) -> Iterator[str]:
    for name, schema in schemas.items():
        yield f'<h3 id="{escape(name)}"><code>{escape(name)}</code></h3>'
        yield f"<p>{_prose(schema)}</p>"
        required = schema.get("required", ())
        rows = [
            _row(
                escape(field) + ("" if field in required else "?"),
                _type_of(of),
                _notes_on(of),
            )
            for field, of in schema.get("properties", {}).items()
        ]
        yield f"<table>{''.join(rows)}</table>"


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _type_of(schema: Any, media: str = "") -> str:
    """A type in words, with links to the objects it is made of."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "contentSchema" in schema:
        return _type_of(schema["contentSchema"])
    if "anyOf" in schema:
        return " or ".join(map(_type_of, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in values)
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    if isinstance(values := schema.get("additionalProperties"), dict):
        return f"map to {_type_of(values)}"
    kind = schema.get("type", media or "anything")
    bounds = ", ".join(text.format(schema[key]) for key, text in _BOUNDS if key in schema)
    return escape(kind) + (f" ({bounds})" if bounds else "")


def _notes_on(schema: Any) -> str:
    notes = [_prose(schema)] if "description" in schema else []
    if schema.get("default") is not None:
        notes.append(f"default {escape(json.dumps(schema['default']))}")
    return "; ".join(notes)


def _prose(described: Any) -> str:
    """A description; what stands between backticks is code."""
    return re.sub(r"(`+)(.+?)\1", r"<code>\2</code>", escape(described.get("description", "")))
