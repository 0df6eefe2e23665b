"""Chat templates render as transformers renders them, within bounds."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import transformers

from moesaic.errors import CheckpointError, InvalidInput, NotReady
from moesaic.models.text.chat import ChatTemplate
from moesaic.models.text.program import Program
from tests.processes import children

CHATML = """{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('unknown role ' ~ message.role) }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
{%- endif %}"""
MESSAGES = [
    {"role": "system", "content": " Be <brief> & kind. "},
    {"role": "user", "content": "Hi 👋"},
]


def load(directory: Path, template: Any) -> ChatTemplate:
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate.load(directory)


@pytest.mark.parametrize(
    ("template", "kwargs"),
    [
        (CHATML, {}),
        (CHATML, {"add_generation_prompt": False}),
        (CHATML, {"enable_thinking": False}),
        (
            "{{ bos_token }}{{ tools | tojson(indent=2) }}{{ messages | tojson }}",
            {"tools": [{"a": "<é>"}]},
        ),
        (
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
            {},
        ),
        (
            "{% for m in messages %}{{ loop.index ~ '/' ~ loop.length ~ loop.last }}"
            "{% if loop.previtem is defined %}{{ loop.previtem.role in ['system', ('a', 'b')] }}{% endif %}"
            "{% for k, v in m.items() %}{{ k }}={{ (v, {'a': [v]})[1] }}{% endfor %}{% endfor %}"
            "{{ messages | map(attribute='role') | join(', ') }}{{ ', '.join(['a', 'b']) | indent(2) }}"
            "{{ 'abab'.replace('a', 'xx', 1) ~ 'abab' | replace('b', '') ~ nothing ~ 1 ~ none }}"
            "{{ '%s is %d' % ('a', 7) ~ '{} {x}'.format(1, x=2) ~ 'a'.ljust(3) ~ 2 ** 8 }}"
            "{% macro f(context, obj=1) %}{{ context }}{{ obj }}{% endmacro %}{{ f(context='c', obj=2) }}",
            {},
        ),
        (
            "  {% if true %}\n    x\n  {% endif %}\n{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}",
            {},
        ),
    ],
)
def test_it_renders_as_transformers_does(
    tmp_path: Path, byte_level_tokenizer: Any, template: str, kwargs: dict[str, Any]
) -> None:
    reference = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_level_tokenizer, eos_token="<|im_end|>", chat_template=template
    )
    kwargs = {"add_generation_prompt": True, **kwargs}

    text = load(tmp_path, template).render(MESSAGES, **kwargs)

    expected = reference.apply_chat_template(MESSAGES, tokenize=False, **kwargs)
    assert text == expected


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")

    assert load(tmp_path, "config").render(MESSAGES) == "file <|im_end|>"


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    assert load(tmp_path, NAMED).render(MESSAGES) == "plain"


@pytest.mark.parametrize("place", ["config", "files", "processor"])
def test_a_conversation_with_tools_has_the_template_for_tools(
    tmp_path: Path, byte_level_tokenizer: Any, place: str
) -> None:
    config = {"chat_template": NAMED, "eos_token": "<|im_end|>"}
    if place == "files":
        (tmp_path / "chat_template.jinja").write_text("plain")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        config["chat_template"] = "neither"
    if place == "processor":
        (tmp_path / "chat_template.json").write_text(json.dumps(config))
        del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    byte_level_tokenizer.save(str(tmp_path / "tokenizer.json"))

    template = ChatTemplate.load(tmp_path)

    assert (template.render(MESSAGES), template.render(MESSAGES, tools=[{}])) == ("plain", "tools")
    if place != "processor":
        reference = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        for tools, text in ((None, "plain"), ([{}], "tools")):
            asked = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
            assert asked == text


def test_templates_without_a_default_are_refused_by_name(tmp_path: Path) -> None:
    template = load(tmp_path, NAMED[:1])

    assert template.render(MESSAGES, tools=[{}]) == "tools"
    with pytest.raises(InvalidInput, match="is for conversations with tools: send tools"):
        template.render(MESSAGES)
    with pytest.raises(InvalidInput, match="templates named rag, and none is the default"):
        load(tmp_path, [{"name": "rag", "template": "x"}])


@pytest.mark.parametrize("name", [[], {}, 7, None])
def test_a_template_without_a_name_is_passed_over(tmp_path: Path, name: Any) -> None:
    named = [{"name": name, "template": "x"}, {"name": "default", "template": "plain"}, "y"]

    assert load(tmp_path, named).render(MESSAGES) == "plain"


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="messages: this model has no chat template"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'A' * 200000000 }}", 7])
def test_an_invalid_template_is_the_checkpoints_fault_or_refused(
    tmp_path: Path, template: Any
) -> None:
    with pytest.raises((CheckpointError, InvalidInput)):
        load(tmp_path, template).render(MESSAGES)


def test_what_a_template_raises_reaches_the_caller(tmp_path: Path) -> None:
    template = load(tmp_path, CHATML)

    with pytest.raises(InvalidInput, match=r"messages: .*unknown role robot"):
        template.render([{"role": "robot", "content": "x"}])
    with pytest.raises(InvalidInput, match=r"messages: .*has no attribute"):
        load(tmp_path, "{{ messages[0].content.parts[0] }}").render(MESSAGES)


def test_only_keywords_that_a_template_reads_reach_it(tmp_path: Path) -> None:
    template = load(
        tmp_path,
        "{% macro f(x=inner) %}{{ x }}{% endmacro %}{{ f() }}{% block b %}{{ blocked }}{% endblock %}"
        "{% if not set is defined %}{% set set = 1 %}{% endif %}{{ set }}{{ range(2) | list }}{{ eos_token }}",
    )
    kwargs = {"inner": [1, {"a": None}], "blocked": 2.5, "set": "x"}
    unknown = {"tokenize": True, "conversation": [], "chat_template": "x", "range": 7}

    text = template.render(MESSAGES, True, **kwargs, **unknown)

    assert text == "[1, {'a': None}]2.5x[0, 1]<|im_end|>"
    assert template.ignored(kwargs | unknown | {"eos_token": "x"}) == [*unknown, "eos_token"]


# What templates of ``transformers`` may use, and what was no use to them before.
@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'a' | center(5) }}|{{ 2.6 | round | int }}|{{ '%05d' | format(7) }}", "  a  |3|00007"),
        ("{{ 'a'.rjust(2000) | length }}{{ 'abc' | wordwrap(2) | length }}", "20004"),
        ("{% for part in [1, 2, 3] | batch(2) %}{{ part | length }}{% endfor %}", "21"),
        ("{{ {'a': 1} | tojson(separators=(',', ':')) }}", '{"a":1}'),
        ("{{ messages | tojson(indent=2) | length > 2 }}{{ 2 ** 64 }}", "True18446744073709551616"),
        ("{% for m in messages %}{{ m.role.replace('s', '+') }}{% endfor %}", "+y+temu+er"),
        ("{% block x %}{{ messages[0].role.replace('s', '+') }}{% endblock %}", "+y+tem"),
        (
            "{% for s in [1, 2, 3] | slice(2) %}{{ s | length }}{% endfor %}{{ 2.25 | round(1) }}",
            "212.2",
        ),
        (
            "{% for m in messages %}{% generation %}{{ m.role }}{% set x = 1 %}{% endgeneration %}{{ x }}{% endfor %}",
            "systemuser",
        ),
        ("{% if tools is not none %}Tools: {% endif %}{{ documents is none }}", "True"),
        (
            "{{ dict(a=1) }}{{ dict.fromkeys('a') }}{{ namespace({'a': 1}, self=2).self }}",
            "{'a': 1}{'a': None}2",
        ),
    ],
)
def test_templates_have_all_of_jinja(tmp_path: Path, template: str, text: str) -> None:
    assert load(tmp_path, template).render(MESSAGES) == text


NAMESPACE = "{% set ns = namespace(a='xx', b=[0]) %}{% for i in range(40) %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._a = 1 %}",
        "{{ dict.mro() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(200000) %}x{% endfor %}",
        "{% set n = messages | length * 100000000 %}{{ 'A' * n }}",
        "{{ ([0] * 9999) * 9999 }}",
        "{% for i in range(1000) %}{{ 'A' * 10000 }}{% endfor %}",
        "{% for a in 'a' * 4000000 %}{% for b in 'a' * 4000000 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(28) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        NAMESPACE + "{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        NAMESPACE + "{% set ns.a = ns.a + ns.a %}{% endfor %}",
        NAMESPACE + "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.b }}",
        NAMESPACE
        + "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.b == [ns.b] }}{{ ns.b | tojson }}",
        NAMESPACE + "{% set ns.a = ns.a | tojson | tojson | tojson %}{% endfor %}",
        NAMESPACE + "{% set ns.a = (ns.a, ns.a) | join | title %}{% endfor %}",
        "{{ 2 ** (10 ** 9) }}",
        "{{ (3 ** 1000000) ** 1000 }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ ('%s' * 1000) % ((('x' * 100000),) * 1000) }}",
        "{{ ('{0}' * 1000).format('x' * 100000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000) }}",
        "{{ 'a'.join(['b' * 1000000] * 1000) }}",
        "{{ ['a' * 1000000] * 1000 | join }}",
        "{{ ('a' * 1000000).translate({97: 'b' * 1000}) }}",
        "{{ ('a' * 1000000).encode() * 1000 }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ 'a' | indent(1000000000, first=True) }}",
        "{{ ('a ' * 1000000) | wordwrap(1) | wordwrap(1) | urlize | pprint }}",
        "{{ range(100000) | map('string') | map('center', 100000) | list | length }}",
        "{{ lipsum(100000) }}",
        "{{ range(99999) | batch(1) | map('list') | map('batch', 99999, 0) | map('list') | list }}",
    ],
)
def test_a_template_can_neither_break_out_nor_run_away(tmp_path: Path, template: str) -> None:
    with pytest.raises((InvalidInput, CheckpointError), match="template"):
        load(tmp_path, template).render(MESSAGES)

    assert load(tmp_path, CHATML).render(MESSAGES).startswith("<|im_start|>")


def test_a_long_conversation_has_memory_in_proportion(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "👋" * 1000}] * 3000

    assert len(load(tmp_path, CHATML).render(long)) > 3_000_000


def test_messages_that_are_too_much_are_refused_each_by_itself(tmp_path: Path) -> None:
    template = load(tmp_path, "{{ messages[0].content * messages[0].content | length }}")
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]

    for content in ("x" * 10_000, "x" * 100_000, deep):
        with pytest.raises(InvalidInput, match="messages: "):
            template.render([{"role": "user", "content": content}])
        assert template.render([{"role": "user", "content": "xy"}]) == "xyxy"


def test_a_helper_that_is_stopped_refuses_no_messages(tmp_path: Path) -> None:
    template = load(tmp_path, CHATML)
    for helper in children("moesaic.models.text.rendering"):
        os.kill(helper, signal.SIGSTOP)

    with pytest.raises(NotReady) as failure:
        template.render(MESSAGES)

    assert (failure.value.http_status, failure.value.retryable) == (503, True)
    assert template.render(MESSAGES)


def test_a_template_that_takes_too_much_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = load(tmp_path, "{{ messages[0].role | center(10 ** 10) }}")
    asked: list[Any] = []
    ask = Program.render

    def counted(program: Program, told: Any) -> str:
        asked.append(told)
        return ask(program, told)

    monkeypatch.setattr(Program, "render", counted)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [MESSAGES[1], {"role": "assistant", "tool_calls": [call]}]

    with pytest.raises(InvalidInput, match=r"messages: .*it makes texts of more than"):
        template.write(turns, True, {})

    assert len(asked) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools[0].function.description + '!' }}",
        "{% for name, one in tools[0].function.parameters.properties.items() %}{{ name }}{% endfor %}",
        "{{ tools[0].function.parameters | tojson }}",
        "{{ 'x' in tools[0].function.parameters.required }}",
    ],
)
@pytest.mark.parametrize("more", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_template_gets_the_fields_that_a_tool_leaves_out(
    source: str, more: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "now", **more}}]

    assert ChatTemplate(source, {}).write([], True, {"tools": tools}) is not None


def test_tools_are_written_as_they_were_sent_wherever_a_template_takes_them() -> None:
    tools = [{"function": {"strict": True, "name": "now", "own": [1]}, "type": "function"}]

    assert ChatTemplate("{{ tools | tojson }}", {}).write([], True, {"tools": tools}) == json.dumps(
        tools
    )
