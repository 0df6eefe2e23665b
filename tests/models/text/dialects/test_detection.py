"""A model's dialect is found by what its chat template writes."""

import pytest

from moesaic.models.text.dialects.detection import dialect_of
from moesaic.models.text.dialects.dialect import Harmony

TEMPLATES = {
    "hermes": '{{ \'<tool_call>\\n{"name": "\' + tool_call.name }} </think>',
    "qwen3_coder": "{{ '<tool_call>\\n<function=' + tool_call.name + '>' }}",
    "glm45": "<tool_call>{{ tc.name }}\\n<arg_key>{{ k }}</arg_key>",
    "minimax_m2": "{% set toolcall_begin_token = '<minimax:tool_call>' %}<invoke name=",
    "kimi_k2": "<|tool_calls_section_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>",
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '```json'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name']",
    "mistral": "[TOOL_CALLS] [",
    "mistral_named": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_markers_of_a_template_tell_the_form(form: str) -> None:
    found = dialect_of(TEMPLATES[form])

    assert found.calls is not None
    assert found.calls.name == form


def test_harmony_is_both() -> None:
    assert isinstance(dialect_of("<|start|>assistant<|channel|>final<|message|>"), Harmony)
    assert isinstance(dialect_of("", calls="harmony"), Harmony)


def test_a_setting_comes_before_the_template() -> None:
    found = dialect_of(TEMPLATES["hermes"], "mistral", "none")

    assert found.calls is not None
    assert (found.calls.name, found.thinking) == ("mistral", None)
    assert dialect_of(TEMPLATES["hermes"], "none", "auto").calls is None


def test_a_template_of_plain_turns_has_none() -> None:
    for template in (None, "{{ messages[0].content }}"):
        found = dialect_of(template)
        assert (found.calls, found.thinking, found.can_call) == (None, None, False)
