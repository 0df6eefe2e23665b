"""Answers as the families write them, and what they say."""

from collections.abc import Sequence

from moesaic.models.text.dialects.detection import dialect_of
from moesaic.models.text.dialects.dialect import Dialect, Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Part
from moesaic.models.text.dialects.thinking import Opened

WEATHER = ToolFunction(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        },
        "required": ["city"],
    },
    strict=True,
)
NOW = ToolFunction("now", {"type": "object", "properties": {}}, strict=True)
FUNCTIONS = (WEATHER, NOW)
WANTED = Wanted(FUNCTIONS)

ANSWERS = {
    "hermes": (
        "<think>\nThe user asks.\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<think>\nThe user asks.\n</think>\n\nLet me see.\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "deepseek_v3": (
        "<think>\nThe user asks.\n</think>\n\nLet me see."
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<think>The user asks.</think>Let me see."
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "glm45": (
        "\n<think>The user asks.</think>\nLet me see.\n"
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>"
    ),
    "kimi_k2": (
        "<think>The user asks.</think>Let me see.<|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "minimax_m2": (
        "<think>\nThe user asks.\n</think>\n\nLet me see.\n<minimax:tool_call>\n"
        '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "mistral": (
        "[THINK]The user asks.[/THINK]Let me see."
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    "mistral_named": (
        "[THINK]The user asks.[/THINK]Let me see."
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]now[ARGS]{}'
    ),
    "harmony": (
        "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|><|start|>assistant'
        " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>"
    ),
}


def dialect(form: str) -> Dialect:
    """The dialect with a form of calls, and the tags around reasoning that its families have."""
    return dialect_of(None, form, "mistral" if form.startswith("mistral") else "think")  # type: ignore[arg-type]


def joined(parts: Sequence[Part]) -> list[Part]:
    """Parts with each text whole."""
    whole: list[Part] = []
    for part in parts:
        if whole and whole[-1].kind == part.kind != "call":
            whole[-1] = whole[-1]._replace(text=whole[-1].text + part.text)
        else:
            whole.append(part)
    return whole


def read(
    spoken: Dialect,
    pieces: str | Sequence[str],
    wanted: Wanted = WANTED,
    opened: Opened = "free",
) -> list[Part]:
    """The parts of an answer that comes in some pieces."""
    reader = spoken.reader(wanted, opened)
    if reader is None:
        return joined([Part("content", "".join(pieces))])
    parts: list[Part] = []
    for piece in [pieces] if isinstance(pieces, str) else pieces:
        parts += reader.feed(piece)
    return joined(parts + reader.finish())
