"""Chat templates in the published patterns of the families, written for these tests."""

QWEN3 = (
    "{%- if tools %}<|im_start|>system\n<tools>{%- for tool in tools %}\n{{ tool | tojson }}{%- endfor %}\n"
    "</tools><|im_end|>\n{%- endif %}"
    "{%- for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if not loop.first or message.content %}{{ '\\n' }}{%- endif %}"
    "{%- set call = call.function %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{%- if call.arguments is string %}{{ call.arguments }}{%- else %}{{ call.arguments | tojson }}{%- endif %}"
    "{{ '}\\n</tool_call>' }}"
    "{%- endfor %}<|im_end|>\n{%- endfor %}"
)
QWEN3_CODER = (
    "{%- for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{%- endfor %}"
    "{%- for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}"
    "{%- if not loop.first %}{{ '\\n' }}{%- endif %}"
    "{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}"
    "{%- for name, value in call.arguments | items %}"
    "{{ '<parameter=' + name + '>\\n' }}"
    "{%- if value is mapping or (value is sequence and value is not string) %}"
    "{%- set value = value | tojson %}{%- else %}{%- set value = value | string %}{%- endif %}"
    "{{ value }}{{ '\\n</parameter>\\n' }}{%- endfor %}"
    "{{ '</function>\\n</tool_call>' }}{%- endfor %}<|im_end|>\n{%- endfor %}"
)
GLM45 = (
    "[gMASK]<sop>{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}"
    "{%- for message in messages %}<|{{ message.role }}|>\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function %}"
    "{{ '\\n<tool_call>' + call.name + '\\n' }}"
    "{%- for name, value in call.arguments.items() %}"
    "{{ '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}"
    "{{ value if value is string else value | tojson(ensure_ascii=False) }}{{ '</arg_value>\\n' }}{%- endfor %}"
    "{{ '</tool_call>' }}{%- endfor %}<|im_end|>{%- endfor %}"
)
GLM47 = GLM45.replace("call.name + '\\n'", "call.name").replace("</arg_key>\\n", "</arg_key>")
GLM47 = GLM47.replace("'</arg_value>\\n'", "'</arg_value>'").replace(
    "'\\n<tool_call>'", "'<tool_call>'"
)
MINIMAX = (
    "{%- for tool in tools or [] %}<tool>{{ tool.function | tojson }}</tool>{%- endfor %}"
    "{%- for message in messages %}]~b]{{ message.role }}\n{{ message.content or '' }}"
    "{%- if message.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    "{{ '<invoke name=\"' + call.name + '\">\\n' }}"
    "{%- for name, value in call.arguments.items() %}"
    "{{ '<parameter name=\"' + name + '\">' }}"
    "{{ value if value is string else value | tojson(ensure_ascii=False) }}{{ '</parameter>\\n' }}{%- endfor %}"
    "{{ '</invoke>\\n' }}{%- endfor %}{{ '</minimax:tool_call>' }}{%- endif %}<|im_end|>\n{%- endfor %}"
)
_DEEPSEEK = (
    "{%- for tool in tools or [] %}{{ tool.function | tojson }}{%- endfor %}"
    "{%- for message in messages %}<｜{{ message.role }}｜>{{ message.content or '' }}"
    "{%- if message.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}"
    "{%- for call in message.tool_calls %}BETWEEN{{ HEAD }}{{ call.function.arguments }}{{ TAIL }}{%- endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{%- endif %}<|im_end|>{%- endfor %}"
)
DEEPSEEK_V31 = (
    _DEEPSEEK.replace("BETWEEN", "")
    .replace("HEAD", "'<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>'")
    .replace("TAIL", "'<｜tool▁call▁end｜>'")
)
DEEPSEEK_V3 = (
    _DEEPSEEK.replace("BETWEEN", "{%- if not loop.first %}{{ '\\n' }}{%- endif %}")
    .replace(
        "HEAD",
        "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n'",
    )
    .replace("TAIL", "'\\n```<｜tool▁call▁end｜>'")
)
KIMI = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}"
    "{%- for message in messages %}<|im_{{ message.role }}|>{{ message.content or '' }}"
    "{%- if message.tool_calls %}<|tool_calls_section_begin|>{%- for call in message.tool_calls %}"
    "<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{%- if call.function.arguments is string %}{{ call.function.arguments }}"
    "{%- else %}{{ call.function.arguments | tojson }}{%- endif %}<|tool_call_end|>{%- endfor %}"
    "<|tool_calls_section_end|>{%- endif %}<|im_end|>{%- endfor %}"
)
MISTRAL = (
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{%- if message.tool_calls %}[TOOL_CALLS][{%- for call in message.tool_calls %}"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "{%- if not loop.last %}, {% endif %}{%- endfor %}]{%- endif %}<|im_end|>{%- endfor %}"
)
MISTRAL_NAMED = (
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for message in messages %}{{ message.role }}: {{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{%- if call.function.arguments is string %}{{ call.function.arguments }}"
    "{%- else %}{{ call.function.arguments | tojson }}{%- endif %}{%- endfor %}<|im_end|>{%- endfor %}"
)
HARMONY = (
    "{%- for tool in tools or [] %}namespace functions {{ tool.function.name }}{%- endfor %}"
    "{%- for message in messages %}<|start|>{{ message.role }}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}"
    "{{- ' to=functions.' + call.function.name + '<|channel|>commentary ' -}}"
    "{{- '<|constrain|>json<|message|>' -}}{{ call.function.arguments | tojson }}{%- endfor %}"
    "{%- else %}<|message|>{{ message.content }}{%- endif %}<|im_end|>{%- endfor %}"
)

TEMPLATES: dict[str, tuple[str, str]] = {
    "qwen3": ("hermes", QWEN3),
    "qwen3_coder": ("qwen3_coder", QWEN3_CODER),
    "glm45": ("glm45", GLM45),
    "glm47": ("glm45", GLM47),
    "minimax_m2": ("minimax_m2", MINIMAX),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek_v31": ("deepseek_v31", DEEPSEEK_V31),
    "kimi_k2": ("kimi_k2", KIMI),
    "mistral": ("mistral", MISTRAL),
    "mistral_named": ("mistral_named", MISTRAL_NAMED),
    "gpt_oss": ("harmony", HARMONY),
}
"""The form of the calls, and the template's text, of each family."""
