"""The rendering of chat templates, in a helper process: ``python -m moesaic.models.text.rendering``.

A template is a program that comes with a model, and what it does depends on messages that anybody may
send. Jinja's sandbox keeps it from reaching anything outside. Its limits of time and memory are those
of the process, so nothing in a template need be counted.
"""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moesaic.helper.limits import Limits
from moesaic.helper.serving import serve

MAX_CHARACTERS = 4_000_000  # of a rendered conversation
MAX_HELD = 64_000_000  # characters that a rendering holds at a time; each takes a byte at least
LIMITS = Limits(
    cpu_s=1.0,
    memory_bytes=MAX_HELD,
    memory_per_byte=32,  # a message's text exists several times, of four bytes a character
    answer_bytes=1 << 25,  # of ``MAX_CHARACTERS``: a control character takes six as JSON
)
MAX_TOLD = 1000  # characters of what a template says


def answer(question: Any) -> dict[str, Any]:
    """Describe or render a template: ``source``, and to render it ``variables`` too.

    Returns:
        ``asks_for``, the names of its variables, or ``text``; or ``refused``, the reason why not.
    """
    source, variables = question["source"], question["variables"]
    try:
        if variables is None:
            return {"asks_for": _asks_for(source)}
        return {"text": _text(_compiled(source), variables)}
    except MemoryError:
        raise
    # A template is a program, and what it trips over lies in the messages.
    except Exception as error:
        return {"refused": str(error)[:MAX_TOLD]}


def _asks_for(source: str) -> list[str]:
    _compiled(source)
    return sorted(jinja2.meta.find_undeclared_variables(_environment().parse(source)))


@functools.lru_cache(maxsize=2)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment in which ``transformers`` renders chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _text(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    pieces, size = [], 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > MAX_CHARACTERS:
            raise jinja2.TemplateRuntimeError(f"their text passes {MAX_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter would escape the text for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    serve(answer, LIMITS)
