"""Every template renders every conversation as ``transformers`` does, or both refuse it.

Conversations are rendered unchanged, and as a client's request, whose messages are put in the form that the template
takes. Users of ``transformers`` write a request in several forms. The expected text is that of the form with the most
visible parts; the product may show more.
"""

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers
import transformers
from jinja2.defaults import DEFAULT_FILTERS as FILTERS
from jinja2.defaults import DEFAULT_TESTS as TESTS

from moesaic.errors import InvalidInput
from moesaic.models.text.chat import ChatTemplate
from moesaic.models.text.program import TemplateRefusal
from moesaic.services.gateway.fields.messages import Message, turns_of
from tests.models.text.templates.conversations import CONVERSATIONS, Conversation
from tests.models.text.templates.corpus import read_corpus

TEMPLATES = read_corpus()
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SAMPLE = 2  # conversations of each template in the quick tests
# The order of fields in the messages of a request.
ORDER = (
    "role",
    "content",
    "tool_calls",
    "reasoning_content",
    "thinking",
    "reasoning",
    "tool_call_id",
)
# Texts that no template should write: Python's form of a message, a text encoded twice, or the mark of
# ``transformers`` for a continued message.
GARBLED = (
    *("{'type'", "{'city'", '\\"city', "{'kinds'", '\\"kinds', "{'limit'", '\\"limit'),
    "CONTINUE_FINAL_MESSAGE_TAG",
)


def sampled() -> list[tuple[str, list[Conversation]]]:
    """Give each template some of the conversations, so that all are used."""
    turns = itertools.cycle(CONVERSATIONS)
    return [(name, list(itertools.islice(turns, SAMPLE))) for name in TEMPLATES]


@pytest.fixture(scope="module", autouse=True)
def helper() -> Iterator[None]:
    """Keep the helper process, which ends with the last template."""
    kept = ChatTemplate("", SPECIAL)
    yield
    del kept


@pytest.mark.parametrize(("name", "conversations"), sampled(), ids=lambda value: str(value)[:30])
def test_templates_render_as_in_transformers(name: str, conversations: list[Conversation]) -> None:
    check(name, conversations)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_renders_every_conversation_as_in_transformers(name: str) -> None:
    check(name, CONVERSATIONS)


VALUES = (
    "m.content",
    "messages",
    "[3, 1, 2]",
    "{'b': 1, 'a': [2]}",
    "2.5",
    "none",
    "nothing",
    "bos_token",
)
ARGUMENTS = ("", "(1)", "('role')", "(2, 'x')", "(attribute='role')", "([1, 'user'])")
EXPRESSIONS = [
    f"{value} {sign} {name}{arguments}"
    for names, sign in ((FILTERS, "|"), (TESTS, "is"))
    for name in sorted(names.keys() - {"random"})
    for value in VALUES
    for arguments in ARGUMENTS
]


def check_expressions(expressions: list[str]) -> None:
    told = CONVERSATIONS[7]
    for expression in expressions:
        source = f"{{% for m in messages %}}{{{{ {expression} }}}}|{{% endfor %}}"
        try:
            written = _as_it_is(ChatTemplate(source, SPECIAL), told)
        except ValueError:
            written = None
        expected = _reference(source, told)
        assert _same_everywhere(written) == _same_everywhere(expected), expression


def test_filters_and_tests_match_transformers() -> None:
    check_expressions(EXPRESSIONS[::61])


@pytest.mark.slow
def test_every_filter_and_test_matches_transformers() -> None:
    check_expressions(EXPRESSIONS)


def _same_everywhere(text: str | None) -> str | None:
    """Remove the addresses of objects."""
    return text and re.sub("0x[0-9a-f]+", "", text)


def test_there_are_enough_templates_and_conversations() -> None:
    assert len(TEMPLATES) >= 60
    assert len(CONVERSATIONS) >= 60


def check(name: str, conversations: list[Conversation]) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    for number, told in enumerate(conversations):
        if not told.continues:
            assert _as_it_is(template, told) == _reference(template.source, told), (name, number)
        expected, written = _expected(template.source, told), _as_request(template, told)
        more = written is not None and _shown(written, told) > _shown(expected or "", told)
        assert more or expected is None or written == expected, (name, number)


def _as_it_is(template: ChatTemplate, told: Conversation) -> str | None:
    kwargs = told.kwargs | ({} if told.tools is None else {"tools": told.tools})
    try:
        return template.render(told.messages, told.opens, **kwargs)
    except TemplateRefusal:
        return None


def _as_request(template: ChatTemplate, told: Conversation) -> str | None:
    messages = turns_of([Message.model_validate(m) for m in told.messages], template.words)
    kwargs = told.kwargs | ({} if told.tools is None else {"tools": told.tools})
    refusal = InvalidInput if told.continues else TemplateRefusal
    try:
        return template.write(messages, told.opens, kwargs, continues=told.continues)
    except refusal:
        return None


def _reference(source: str, told: Conversation, messages: list[Any] | None = None) -> str | None:
    """Render with ``transformers``; None: it refuses."""
    try:
        return str(
            _tokenizer(source).apply_chat_template(
                told.messages if messages is None else messages,
                tools=told.tools,
                tokenize=False,
                add_generation_prompt=told.opens,
                continue_final_message=told.continues,
                **told.kwargs,
            )
        )
    except Exception:  # any error of a template
        return None


@functools.cache
def _tokenizer(source: str) -> Any:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    made = transformers.PreTrainedTokenizerFast  # type: ignore[no-untyped-call]
    return made(tokenizer_object=inner, chat_template=source, **SPECIAL)


def _expected(source: str, told: Conversation) -> str | None:
    """Render with ``transformers`` the form of a request with the most visible parts; None: it refuses all."""
    texts = (_reference(source, told, messages) for messages in _forms(source, told))
    sound = [text for text in texts if text and not any(mark in text for mark in GARBLED)]
    return max(sound, key=lambda text: _shown(text, told), default=None)


def _forms(source: str, told: Conversation) -> Iterator[list[dict[str, Any]]]:
    """Write a request: arguments as objects or strings; contents of each role unchanged, as strings or as parts."""
    roles = dict.fromkeys(message["role"] for message in told.messages)
    for objects in (True, False):
        for forms in itertools.product(("sent", "text", "parts"), repeat=len(roles)):
            form_of = dict(zip(roles, forms, strict=True))
            yield [_sent(source, m, objects, form_of[m["role"]]) for m in told.messages]


def _sent(source: str, message: dict[str, Any], objects: bool, form: str) -> dict[str, Any]:
    names = dict.fromkeys([*ORDER, *message])
    sent = {name: message[name] for name in names if message.get(name) is not None}
    if sent["role"] == "developer" and "developer" not in source:
        sent["role"] = "system"
    content = sent.get("content")
    if isinstance(content, list) and form == "text":
        sent["content"] = "\n".join(part["text"] for part in content)
    if content and isinstance(content, str) and form == "parts":
        sent["content"] = [{"type": "text", "text": content}]
    if objects and "tool_calls" in sent:
        sent["tool_calls"] = [_with_object(call) for call in sent["tool_calls"]]
    return sent


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


def _shown(written: str, told: Conversation) -> int:
    """Count the visible parts of a request in a prompt: contents, and names of called functions."""
    found = []
    for message in told.messages:
        content = message.get("content") or ""
        found += [part["text"] for part in content] if isinstance(content, list) else [content]
        found += [call["function"]["name"] for call in message.get("tool_calls", [])]
    texts = Counter(text.strip() for text in found if text.strip())
    return sum(min(written.count(text), often) for text, often in texts.items())
