"""A model's dialect is found by what its chat template writes."""

import pytest

from moesaic.models.text.dialects.detection import dialect_of
from moesaic.models.text.dialects.dialect import Harmony
from tests.models.text.dialects.calls.templates import HARMONY, QWEN3, TEMPLATES


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "gpt_oss"])
def test_the_markers_of_a_template_tell_the_form(name: str) -> None:
    form, template = TEMPLATES[name]

    found = dialect_of(template)

    assert found.calls is not None
    assert found.calls.name == form


def test_harmony_is_both() -> None:
    assert isinstance(dialect_of(HARMONY), Harmony)
    assert isinstance(dialect_of("", calls="harmony"), Harmony)


def test_a_setting_comes_before_the_template() -> None:
    found = dialect_of(QWEN3, "mistral", "none")

    assert found.calls is not None
    assert (found.calls.name, found.thinking) == ("mistral", None)
    assert dialect_of(QWEN3, "none", "auto").calls is None


def test_a_template_of_plain_turns_has_none() -> None:
    for template in (None, "{{ messages[0].content }}"):
        found = dialect_of(template)
        assert (found.calls, found.thinking, found.can_call) == (None, None, False)
