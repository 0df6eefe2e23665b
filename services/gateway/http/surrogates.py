"""Lone surrogates: JSON can write them (``"\\ud800"``), but they are no text and nothing can encode them."""

from contextlib import suppress
from typing import Any, NamedTuple, Optional

import msgspec

from moesaic.errors import InvalidInput
from moesaic.services.gateway.http.problems import field_name

MAX_NAMED_STEPS = 8  # how deep into a body an error points


class _Step(NamedTuple):
    """One step of the way to a value, from the inside out: one object a value, however deep the body is."""

    outer: Optional["_Step"]
    name: str | int


def check_unicode(body: Any) -> None:
    """Refuse decoded JSON that holds a lone surrogate anywhere.

    Raises:
        InvalidInput: naming the field, or the object of a field whose name has one.
    """
    with suppress(Exception):  # of any kind: the search below finds it
        msgspec.json.encode(body)  # which is a hundred times as fast
        return
    left: list[tuple[_Step | None, Any]] = [(None, body)]  # no recursion: a body may be deep
    while left:
        step, value = left.pop()
        if isinstance(value, str):
            _check(step, value)
        elif isinstance(value, list):
            left += [(_Step(step, i), v) for i, v in enumerate(value) if type(v) is not int]
        elif isinstance(value, dict):
            for name, item in value.items():
                _check(step, name)
                left.append((_Step(step, name), item))


def _check(step: _Step | None, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        path: list[str | int] = []
        while step is not None:
            path.append(step.name)
            step = step.outer
        fix = f"not valid Unicode: a lone surrogate at character {error.start}"
        raise InvalidInput(field_name(["body", *path[: -MAX_NAMED_STEPS - 1 : -1]]), fix) from None
