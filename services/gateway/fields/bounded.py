"""Base of the objects that bodies are made of: checking one stops soon after its first errors.

The validator would report every error there is, and to report half a million of them takes ten seconds. So a list is
left at the first item that is wrong, and of members beyond what an object may have one is looked at. Between two
items that are objects the event loop gets the interpreter, if it waits for it.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, cast

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function as before

_QUICK = ("int", "str", "float", "any", None)


def _pause(value: Any) -> Any:
    """Let other threads have the interpreter, which the validator itself never does."""
    return value


def _bounded(schema: Any, forbids: bool) -> Any:
    """Bound the errors of a schema and of those within it."""
    if isinstance(schema, list | tuple):
        return type(schema)(_bounded(inner, forbids) for inner in schema)
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind == "model":  # another object, which has done this itself
        return schema
    for key, inner in schema.items():
        if key != "metadata" or not isinstance(kind, str):  # it is a field of that name
            schema[key] = _bounded(inner, forbids)
    if kind == "list":
        schema["fail_fast"] = True
        items = schema.get("items_schema", {})
        if items.get("type") not in _QUICK:
            schema["items_schema"] = before(_pause, items)
    elif kind == "dict" and "max_length" in schema:
        return _trimmed(schema, _at_most(schema["max_length"] + 1))
    elif kind == "model-fields" and forbids:
        return _trimmed(schema, _one_unknown(frozenset(schema["fields"])))
    return schema


def _trimmed(schema: Any, part_of: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Have a schema see a part of an object."""

    def trim(value: Any) -> Any:
        return part_of(value) if isinstance(value, dict) else value

    return before(trim, schema)


def _at_most(count: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def trimmed(value: dict[str, Any]) -> dict[str, Any]:
        return value if len(value) <= count else dict(islice(value.items(), count))

    return trimmed


def _one_unknown(known: frozenset[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def trimmed(value: dict[str, Any]) -> dict[str, Any]:
        first = next((name for name in value if name not in known), None)
        if first is None:
            return value
        return {name: item for name, item in value.items() if name in known or name == first}

    return trimmed


class Bounded(BaseModel):
    """An object with few errors, whatever fields it has and however long their values are."""

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler, /
    ) -> CoreSchema:
        """Bound the errors of all fields, those of later versions too."""
        schema: Any = handler(source)
        if not isinstance(cls.__dict__.get("__pydantic_core_schema__"), dict):  # it is being made
            own = schema
            while own["type"] != "model":  # but a validator around it
                own = own["schema"]
            forbids = cls.model_config.get("extra") == "forbid"
            own["schema"] = _bounded(own["schema"], forbids)
        return cast(CoreSchema, schema)
