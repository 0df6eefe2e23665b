"""Calls that differ from the templates: doubled or missing tags, other quotes, other forms."""

import json
from typing import Any

import pytest

from moesaic.models.text.dialects.dialect import Wanted
from moesaic.models.text.dialects.functions import ToolFunction
from tests.models.text.dialects.examples import NOW, WEATHER, dialect, joined, read

WRITE = ToolFunction(
    "write_file",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    },
)
WANTED = Wanted((WEATHER, NOW, WRITE))
PARIS = {"city": "Paris"}
DOCUMENT = "<a>\n</parameter> </arg_value> so\n"
OBJECT = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
# The form, the answer, the arguments of its calls, and its content.
CASES: list[tuple[str, str, list[Any], str]] = [
    ("qwen3_coder", "<tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", [{}], ""),
    ("qwen3_coder", f"<tool_call>\n{OBJECT}\n</tool_call> ok", [PARIS], "ok"),
    ("qwen3_coder", '<tool_call><function="get_weather"><parameter="city">Paris</parameter></function></tool_call>',
     [PARIS], ""),
    ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</parameter>\n"
     "</function>\n</tool_call>", [PARIS], ""),
    ("qwen3_coder", "<tool_call>\r\n<function=get_weather>\r\n<parameter=city>\r\nParis\r\n</parameter>\r\n"
     "</function>\r\n</tool_call>", [PARIS], ""),
    ("qwen3_coder", f"<function=write_file>\n<parameter=path>\na\n</parameter>\n<parameter=content>\n{DOCUMENT}\n"
     "</parameter>\n</function>", [{"path": "a", "content": DOCUMENT}], ""),
    ("qwen3_coder", "<function=write_file>\n<parameter=path>\na </parameter>\n</parameter>\n</function>",
     [{"path": "a </parameter>"}], ""),
    ("glm45", "<tool_call><tool_call>\nnow\n</tool_call>", [{}], ""),
    ("glm45", f"<tool_call>{OBJECT}</tool_call>", [PARIS], ""),
    ("glm45", f"<tool_call>write_file<arg_key>path</arg_key><arg_value>a</arg_value><arg_key>content</arg_key>"
     f"<arg_value>{DOCUMENT}</arg_value></tool_call>", [{"path": "a", "content": DOCUMENT}], ""),
    ("minimax_m2", f'<minimax:tool_call>\n<invoke name="write_file">\n<parameter name="path">a</parameter>\n'
     f'<parameter name="content">{DOCUMENT}</parameter>\n</invoke>\n</minimax:tool_call>',
     [{"path": "a", "content": DOCUMENT}], ""),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_end|>"
     "<|tool_calls_section_end|>", [{}], ""),
    ("deepseek_v31", '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>',
     [PARIS], ""),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
     '```\n{"city": "Paris"}\n```<｜tool▁call▁end｜>', [PARIS], ""),
    ("mistral", f"[TOOL_CALLS]{OBJECT}", [PARIS], ""),
    ("harmony", '<|channel|>commentary to=get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
     [PARIS], ""),
]  # fmt: skip


@pytest.mark.parametrize(("form", "answer", "calls", "content"), CASES)
def test_calls_are_read_however_their_text_is_cut(
    form: str, answer: str, calls: list[Any], content: str
) -> None:
    told = read(dialect(form), answer, WANTED, "closed")

    assert [json.loads(part.text) for part in told if part.kind == "arguments"] == calls
    assert joined([part for part in told if part.kind == "content"]) == joined(
        read(dialect(form), content, Wanted(), "closed") if content else []
    )
    for cut in (list(answer), *([answer[:i], answer[i:]] for i in range(1, len(answer)))):
        assert read(dialect(form), cut, WANTED, "closed") == told
