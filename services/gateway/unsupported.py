"""What a body has besides the fields of its route: refused by name where it would change the answer, else named."""

import json
import re
from collections.abc import Iterator
from typing import Any

import structlog
from pydantic import BaseModel

from moesaic.errors import InvalidInput
from services.gateway.known_fields import ONLY_KNOWN, REFUSED, WITHIN, Refusal

log = structlog.get_logger()

MAX_NAMES = 20
MAX_NAME_CHARS = 60
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")  # in a header


def check_extras(body: BaseModel) -> list[str]:
    """Refuse what cannot be honoured, and name what is passed over.

    Returns:
        names of unknown fields that say something, sorted, safe in a header; of very many the first, and how many more.

    Raises:
        InvalidInput: with code ``unsupported_parameter`` and the field's name.
    """
    ignored: set[str] = set()
    for name, value in (body.model_extra or {}).items():
        refusal = REFUSED.get(name)
        if name == "best_of" and refusal is not None:
            refusal = refusal._replace(neutral=(getattr(body, "n", 1),))
        _take(name, value, refusal, ignored, name)
    for name, place, part in _parts(body, "", ""):
        for field, value in (part.model_extra or {}).items():
            refusal = WITHIN.get(name, {}).get(field)
            if name in ONLY_KNOWN:
                refusal = Refusal("", ONLY_KNOWN[name])
            _take(f"{place}.{field}", value, refusal, ignored, f"{name}.{field}")
    return _shown(ignored)


def _take(field: str, value: Any, refusal: Refusal | None, ignored: set[str], name: str) -> None:
    if value is None:
        return
    if refusal is None:
        ignored.add(name)
    elif value not in refusal.neutral:
        alternatives = [f"use {refusal.instead}"] if refusal.instead else []
        neutral = "".join(f" or send {json.dumps(value)}" for value in refusal.neutral)
        alternatives.append(f"leave it out{neutral}")
        fix = f"is not supported: {', or '.join(alternatives)}"
        raise InvalidInput(field[: 3 * MAX_NAME_CHARS], fix, code="unsupported_parameter")


def _parts(body: BaseModel, name: str, place: str) -> Iterator[tuple[str, str, BaseModel]]:
    """The objects in the fields of a body, and those in them: each one's name, its place, and itself."""
    for field in body.model_fields_set - (body.model_extra or {}).keys():
        value = getattr(body, field)
        inner, at = f"{name}.{field}" if name else field, f"{place}.{field}" if place else field
        found = [(at, value)]
        if isinstance(value, list):
            found = [(f"{at}[{i}]", item) for i, item in enumerate(value)]
        for at, item in found:
            if isinstance(item, BaseModel):
                yield inner, at, item
                yield from _parts(item, inner, at)


def _shown(names: set[str]) -> list[str]:
    if not names:
        return []
    log.debug("request.fields_ignored", fields=sorted(names)[:MAX_NAMES])
    shown = sorted({_UNSAFE.sub("_", name[:MAX_NAME_CHARS]) for name in names})
    more = [f"and-{len(shown) - MAX_NAMES}-more"] if len(shown) > MAX_NAMES else []
    return [*shown[:MAX_NAMES], *more]
