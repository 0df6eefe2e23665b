"""Chat templates render as transformers renders them, within bounds."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from moesaic.errors import CheckpointError, InvalidInput
from moesaic.models.text.chat import ChatTemplate

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


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]

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


@pytest.mark.parametrize(
    "name", ["tokenize", "conversation", "chat_template", "messages_", "range"]
)
def test_only_known_keywords_reach_a_template(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match=f"chat_template_kwargs.{name}: is not one of"):
        load(tmp_path, CHATML).render(MESSAGES, True, **{name: "x"})


@pytest.mark.parametrize("name", ["center", "lipsum", "wordwrap", "round"])
def test_what_cannot_be_bounded_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises((CheckpointError, InvalidInput), match=name):
        load(tmp_path, f"{{{{ 1 | {name} }}}}{{{{ {name}() }}}}").render(MESSAGES)


def test_a_template_that_takes_long_is_known_as_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.models.text.chat.SLOW_S", 0.002)  # a fast machine's long
    slow, quick = "{% for i in range(90000) %}{% endfor %}{{ 1 }}", "{{ 1 }}"

    for text, is_slow in ((slow * 3, True), (quick, False)):
        template = load(tmp_path, text)
        with contextlib.suppress(InvalidInput):
            template.render(MESSAGES)
        assert template.is_slow == is_slow


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}",
        "{% for i in range(200000) %}x{% endfor %}",
        "{% set n = messages | length * 100000000 %}{{ 'A' * n }}",
        "{{ ([0] * 9999) * 9999 }}",
        "{% for i in range(1000) %}{{ 'A' * 10000 }}{% endfor %}",
        "{% for a in 'a' * 4000000 %}{% for b in 'a' * 4000000 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(28) }}",
        "{% set ns = namespace(a='xx') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set ns = namespace(a='xx') %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a=[0]) %}{% for i in range(40) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}",
        "{{ 2 ** (10 ** 9) }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000) }}",
        "{{ ['a' * 1000000] * 1000 | join }}",
        "{{ messages | tojson(indent=1000000000) }}",
    ],
)
def test_a_template_can_neither_break_out_nor_run_away(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidInput, match="messages"):
        load(tmp_path, template).render(MESSAGES)
