"""Chat templates render as transformers renders them, within bounds."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from moesaic.errors import CheckpointError, InvalidInput
from moesaic.models.chat import ChatTemplate

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
    ],
)
def test_a_template_can_neither_break_out_nor_run_away(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidInput, match="messages"):
        load(tmp_path, template).render(MESSAGES)
