"""The speech of a chat's answers: which calls they may have, how they are read, and what binds them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from moesaic.errors import InvalidInput
from moesaic.models.text.dialects.dialect import NOTHING, Body, Dialect, Wanted
from moesaic.models.text.dialects.reader import Reader
from moesaic.models.text.dialects.rules import Rules
from moesaic.models.text.dialects.thinking import SWITCHES, Opened
from moesaic.models.text.schemas.binding import TooLong
from moesaic.models.text.schemas.raw_texts import slashes_escaped
from moesaic.services.gateway.fields.generating import ChatWire
from moesaic.services.gateway.fields.messages import ToolWire, choice_of
from moesaic.services.gateway.generate.runs import bounded, check_strict, names_of, too_long
from moesaic.services.gateway.language import Language
from moesaic.v1.attention_pb2 import Grammar

TokenId = Callable[[str], int | None]
Unenforced = dict[str, set[str]]


@dataclass(frozen=True)
class Speech:
    """Properties of the answers to one request, known before they come.

    Attributes:
        dialect: of the model.
        wanted: calls that the request allows.
        opened: how its prompt leaves the reasoning.
    """

    dialect: Dialect = field(default_factory=Dialect)
    wanted: Wanted = NOTHING
    opened: Opened = "closed"

    @functools.cached_property
    def is_plain(self) -> bool:
        """True if all of an answer is content."""
        return self.reader() is None

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the text of an answer must keep."""
        return self.dialect.markers(self.wanted)

    def reader(self) -> Reader | None:
        """Make a reader of one answer; None: all of it is content."""
        return self.dialect.reader(self.wanted, self.opened)

    def sets_aside(self, asked: Grammar | None) -> bool:
        """True for the form of an answer's text, if the answer must call and has none."""
        return self.wanted.needed and asked is not None and asked.field == "response_format"

    def grammar(
        self, asked: Grammar | None, token_id: TokenId, unenforced: Unenforced | None = None
    ) -> Grammar | None:
        """Combine the requested form of the answer with its calls and the reasoning before it.

        Args:
            asked: the form.
            token_id: returns the id of the token with exactly that text, if there is one.
            unenforced: filled with the schema keywords that the grammar does not enforce, by function.

        Raises:
            InvalidInput: they cannot be combined.
        """
        wanted = self.wanted
        if self.sets_aside(asked):
            asked = None
        if asked is not None and wanted.needed:
            raise InvalidInput(asked.field, "cannot be combined with a tool_choice that must call")
        body = _body_of(asked) if asked is not None else None
        if asked is not None and body is None:
            if wanted.tools:
                fix = "cannot be combined with tools; a JSON schema, a regex or a choice can"
                raise InvalidInput(asked.field, fix)
            return asked
        if asked is not None and not wanted.tools and self.opened == "closed":
            return asked
        field = asked.field if asked is not None else "tools"
        try:
            text = self.dialect.grammar(token_id, self.opened, wanted, body, unenforced)
        except TooLong:
            raise too_long(field) from None
        return asked if text is None else bounded(Grammar(grammar=text, field=field))


PLAIN = Speech()


def wanted_of(body: ChatWire, language: Language) -> Wanted:
    """Find the calls that a request allows.

    Raises:
        InvalidInput: its fields contradict each other, or this model cannot call.
    """
    choice = choice_of(body.tool_choice)
    if not body.tools:
        if choice.names or choice.mode == "required":
            raise InvalidInput("tool_choice", "needs tools, but the request has none")
        return NOTHING
    functions = [tool.known for tool in body.tools]
    known = {function.name for function in functions}
    for name in choice.names:
        if name not in known:
            names = ", ".join(function.name for function in functions)[:300]
            raise InvalidInput(
                "tool_choice", f"names an unknown tool: {name[:60]!r} is not in {names}"
            )
    if choice.mode == "none":
        return NOTHING
    _check_model(language)
    needed = choice.mode == "required"
    # Else the grammar reads them.
    if not needed:
        for function in functions:
            function.prepare()
    allowed = [
        replace(function, strict=True) if needed else function
        for function in functions
        if not choice.names or function.name in choice.names
    ]
    bound = needed or len(allowed) < len(functions) or any(one.strict for one in allowed)
    many = not choice.once and body.parallel_tool_calls is not False
    return Wanted(allowed, needed=needed, bound=bound, many=many)


def unenforced_names(tools: Sequence[ToolWire], unenforced: Unenforced) -> list[str]:
    """List the keywords of functions' schemas that the grammar of their calls does not enforce.

    Raises:
        InvalidInput: a strict function has such a keyword.
    """
    named = []
    for number, tool in enumerate(tools):
        field, keywords = f"tools[{number}].function.parameters", unenforced.get(tool.function.name)
        if keywords:
            check_strict(field, keywords, strict=bool(tool.function.strict))
            named += names_of(field, keywords)
    return named


def _check_model(language: Language) -> None:
    if not language.takes("tools"):
        fix = "this model's chat template has no place for them: leave them out, or send tool_choice none"
        raise InvalidInput("tools", fix, code="unsupported_parameter")
    if not language.dialect.can_call:
        fix = (
            "the form of this model's calls is not known: name it with --tool-call-parser of the gateway, "
            "or send tool_choice none"
        )
        raise InvalidInput("tools", fix, code="unsupported_parameter")


def template_kwargs_of(body: ChatWire, language: Language) -> tuple[dict[str, Any], list[str]]:
    """Make the keywords for the chat template; ``chat_template_kwargs`` overrides the other fields.

    Returns:
        The keywords, and the names of fields that this template does not read.
    """
    effort = body.reasoning_effort
    asked = {"reasoning_effort": effort, "verbosity": body.verbosity}
    fields = {name: value for name, value in asked.items() if value is not None}
    given = body.chat_template_kwargs or {}
    asks = effort is not None and given.keys().isdisjoint(SWITCHES)
    switches = dict.fromkeys(SWITCHES, effort != "none") if asks else {}
    kwargs = {k: value for k, value in (fields | switches).items() if language.takes(k)}
    unknown = fields.keys() - kwargs.keys()
    if switches.keys() & kwargs.keys() or (effort == "none" and not language.dialect.thinks):
        unknown -= {"reasoning_effort"}
    return kwargs | given, sorted(unknown)


def tools_for_template(body: ChatWire, wanted: Wanted) -> Sequence[Mapping[str, Any]] | None:
    """Write the tools for the chat template: none where none may be called."""
    return [tool.for_template() for tool in body.tools or []] if wanted.tools else None


def _body_of(asked: Grammar) -> Body | None:
    """Write the form of an answer as a rule; None: it cannot be a part of a grammar."""
    kind = asked.WhichOneof("kind")
    if kind == "json_schema":
        try:
            msgspec.json.decode(asked.json_schema)
        except ValueError:
            # The worker says what is wrong with it.
            return None
        return lambda rules: rules.add(f"%json {asked.json_schema}")
    if kind == "choice":
        return lambda rules: _choice_rule(rules, msgspec.json.decode(asked.choice))
    if kind == "regex":
        return lambda rules: rules.add(f"/{slashes_escaped(asked.regex)}/")
    return None


def _choice_rule(rules: Rules, texts: Sequence[str]) -> str:
    return rules.add(" | ".join(map(rules.text, texts)))
