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
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
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
    """Describe the template ``source``, or render it if there are ``variables``.

    Returns:
        ``asks_for``, the names of its variables, and ``words``, the fields and strings that it names; or ``text``; or
        ``refused``, the reason of a failure.
    """
    source, variables = question["source"], question["variables"]
    try:
        if variables is None:
            return _described(source)
        return {"text": _text(_compiled(source), variables)}
    except MemoryError:
        raise
    # A template is a program, and what it trips over lies in the messages.
    except Exception as error:
        return {"refused": str(error)[:MAX_TOLD]}


def _described(source: str) -> dict[str, list[str]]:
    _compiled(source)
    tree = _environment().parse(source)
    fields = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    asks_for = jinja2.meta.find_undeclared_variables(tree)
    return {"asks_for": sorted(asks_for), "words": sorted(fields | texts)}


@functools.lru_cache(maxsize=2)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


class _Generation(Extension):
    """``{% generation %}``, which marks the assistant's part for training: a scope, whose text is unchanged."""

    tags = {"generation"}  # noqa: RUF012  # as its base declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: jinja2.runtime.Macro) -> str:
        text: str = caller()
        return text


class _Dict:
    """``dict``, without access to the class of Python."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace``, which stores no names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # The first argument is this object; ``self`` may be a name to store.
        this, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _check_stored(name)
        jinja2.utils.Namespace.__init__(this, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_stored(name)
        super().__setitem__(name, value)


def _check_stored(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Make the environment in which ``transformers`` renders chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
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
