"""Unknown fields of a body: refused by name if they would change the answer, else passed over and named."""

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

import structlog
from pydantic import BaseModel

from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.known import ONLY_KNOWN, REFUSED, WITHIN, Refusal

log = structlog.get_logger()

MAX_NAMES = 20
MAX_NAME_CHARS = 60
MOST_NAMES = 200  # that are sorted
_Steps = tuple[str | int, ...]
_Part = tuple[_Steps, dict[str, Any]]  # where an object is, and its unknown fields
_PLAIN = {type(None), bool, int, float, str, dict}  # to ask any other way takes far longer
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")  # in a header


def check_extras(body: BaseModel) -> list[str]:
    """Refuse fields that cannot be honoured, and name those that are passed over.

    Returns:
        Names of unknown fields that have a value, sorted, safe in a header; of very many some, and ``and-more``.

    Raises:
        InvalidInput: with code ``unsupported_parameter`` and the field's name.
    """
    ignored: set[str] = set()
    for name, value in (body.model_extra or {}).items():
        refusal = REFUSED.get(name)
        if name == "best_of" and refusal is not None:
            refusal = refusal._replace(neutral=(getattr(body, "n", 1),))
        _take(name, value, refusal, ignored, name)
    parts: list[_Part] = []
    _find_parts(body, (), parts)
    for steps, extras in parts:
        name = ".".join(step for step in steps if isinstance(step, str))
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
        for field, value in extras.items():
            refusal = WITHIN.get(name, {}).get(field)
            if name in ONLY_KNOWN:
                refusal = Refusal("", ONLY_KNOWN[name])
            _take(f"{place[1:]}.{field}", value, refusal, ignored, f"{name}.{field}")
    return _shown(ignored)


def with_template(
    ignored: Sequence[str], keywords: Sequence[str], words: Collection[str]
) -> list[str]:
    """List the ignored fields of a chat, when its template is known.

    Args:
        ignored: fields that ``check_extras`` named.
        keywords: keywords for the template that it does not ask for.
        words: fields that the template names, so fields of messages with these names are not ignored. No field of
            tools is ignored, since tools reach the template whole.
    """
    left = {
        name
        for name in ignored
        if not name.startswith("tools.")
        and (name.removeprefix("messages.") not in words or "." not in name)
    }
    return _shown(left | set(keywords[:MOST_NAMES]))


def _take(field: str, value: Any, refusal: Refusal | None, ignored: set[str], name: str) -> None:
    if value is None:
        return
    if refusal is None:
        if len(ignored) < MOST_NAMES:
            ignored.add(name)
    elif value not in refusal.neutral:
        alternatives = [f"use {refusal.instead}"] if refusal.instead else []
        neutral = "".join(f" or send {json.dumps(value)}" for value in refusal.neutral)
        alternatives.append(f"leave it out{neutral}")
        fix = f"is not supported: {', or '.join(alternatives)}"
        raise InvalidInput(field[: 3 * MAX_NAME_CHARS], fix, code="unsupported_parameter")


def _find_parts(body: BaseModel, steps: _Steps, found: list[_Part]) -> None:
    """Find the objects within a body that have unknown fields: few of what may be thousands."""
    for field, value in body.__dict__.items():
        if type(value) in _PLAIN:
            continue
        if type(value) is not list:
            _note_part(value, (*steps, field), found)
        elif value and type(value[0]) is not int:
            for i, item in enumerate(value):
                if type(item) not in _PLAIN:
                    _note_part(item, (*steps, field, i), found)


def _note_part(item: Any, steps: _Steps, found: list[_Part]) -> None:
    extras = getattr(item, "__pydantic_extra__", None)
    if extras:
        found.append((steps, extras))
    if extras is not None:  # it is an object, not a list
        _find_parts(item, steps, found)


def _shown(names: set[str]) -> list[str]:
    if not names:
        return []
    log.debug("request.fields_ignored", fields=sorted(names)[:MAX_NAMES])
    return few(sorted({_UNSAFE.sub("_", name[:MAX_NAME_CHARS]) for name in names}))


def few(names: list[str]) -> list[str]:
    """Limit the names in a header: the first ones, and ``and-more`` for the others."""
    return names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], "and-more"]
