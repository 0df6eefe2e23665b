"""Detection of a model's dialect, by the markers in its chat template; settings may name it instead."""

from typing import Literal

from moesaic.models.text.dialects.call_form import CallForm
from moesaic.models.text.dialects.deepseek import DeepSeekV3, DeepSeekV31
from moesaic.models.text.dialects.dialect import Dialect, Harmony
from moesaic.models.text.dialects.hermes import Hermes
from moesaic.models.text.dialects.kimi import Kimi
from moesaic.models.text.dialects.mistral import Mistral, MistralNamed
from moesaic.models.text.dialects.tagged import Glm, MiniMax, QwenCoder
from moesaic.models.text.dialects.thinking import MISTRAL, THINK, ThinkingTags

ToolCallParser = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "harmony",
    "hermes",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "mistral_named",
    "qwen3_coder",
]
ReasoningParser = Literal["auto", "none", "harmony", "mistral", "think"]

_FORMS: dict[str, CallForm] = {
    form.name: form
    for form in (
        *(DeepSeekV3(), DeepSeekV31(), Glm(), Hermes(), Kimi()),
        *(MiniMax(), Mistral(), MistralNamed(), QwenCoder()),
    )
}
_TAGS: dict[str, ThinkingTags] = {tags.name: tags for tags in (THINK, MISTRAL)}
# Marks of each form in templates, the special ones first: ``<tool_call>`` is in several.
_MARKS: list[tuple[str, tuple[str, ...]]] = [
    ("harmony", ("<|channel|>", "<|message|>")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("minimax_m2", ("<invoke name=", "minimax")),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=",)),
    ("mistral_named", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
]


def dialect_of(
    template: str | None, calls: ToolCallParser = "auto", reasoning: ReasoningParser = "auto"
) -> Dialect:
    """Find the dialect of a model.

    Args:
        template: its chat template, if it has one.
        calls: form of the calls, if not by the template.
        reasoning: form of the reasoning, likewise.
    """
    source = template or ""
    form = _form_in(source) if calls == "auto" else calls
    if form == "harmony" or reasoning == "harmony":
        return Harmony()
    tags = _TAGS.get(_tags_in(source) if reasoning == "auto" else reasoning)
    return Dialect(tags, _FORMS.get(form))


def _form_in(template: str) -> str:
    found = (name for name, marks in _MARKS if all(mark in template for mark in marks))
    return next(found, "none")


def _tags_in(template: str) -> str:
    found = (
        name for name, tags in _TAGS.items() if tags.open in template or tags.close in template
    )
    return next(found, "none")
