"""Models of several families at the gateway's door: their templates, their markers, a tiny vocabulary."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from moesaic.services.gateway.language import Language
from tests.gateway.conftest import CONFIG, build_tokenizer

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ASKED = [{"role": "user", "content": "weather in Paris?"}]
HERMES = (
    "{%- if tools -%}<|im_start|>system\n{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}"
    "<|im_end|>\n{%- endif -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{%- endif %}"
    "{%- endif -%}"
)
DEEPSEEK = (
    "{%- for tool in tools or [] %}{{ tool.function.name }}{%- endfor %}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{%- elif message.role == 'assistant' and message.content is none %}"
    "{{ '<｜tool▁calls▁begin｜>' }}{%- for call in message.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
    "{{ '<｜tool▁call▁end｜>' }}{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}"
    "{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content }}"
    "{%- else %}{{ '<｜Assistant｜>' + message.content }}{%- endif %}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>' if thinking else '<｜Assistant｜></think>' }}"
    "{%- endif -%}"
)
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}"
    "{%- for tool in tools or [] %} {{ tool.function.name }}{%- endfor %}<|end|>"
    "{%- for message in messages -%}"
    "{%- if message.tool_calls %}"
    "{%- if message.content and message.thinking %}{{ raise_exception('not both') }}{%- endif %}"
    "{%- if message.thinking or message.content %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ message.thinking or message.content }}<|end|>{%- endif %}"
    "{%- for call in message.tool_calls %}<|start|>assistant to=functions.{{ call.function.name }}"
    "<|channel|>commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>"
    "{%- endfor %}{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>"
    "{%- endif %}{%- endfor -%}{%- if add_generation_prompt %}<|start|>assistant{%- endif -%}"
)
QWEN_CODER = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{%- for name, value in call.function.arguments | items %}"
    "{{ '\n<parameter=' + name + '>\n' }}{{ value }}{{ '\n</parameter>' }}{%- endfor %}"
    "\n</function>\n</tool_call>{%- endfor %}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


ASKING = (
    "{{ reasoning_effort }} {{ verbosity }}{%- if thinking %}<think>{%- endif %}"
    "{%- for message in messages %}{{ message.content }}{%- endfor %}"
)


@dataclass
class Family:
    """A family's template and added tokens: those that are special, and markup."""

    template: str
    special: list[str] = field(default_factory=list)
    markup: list[str] = field(default_factory=list)


FAMILIES = {
    "asking": Family(ASKING),
    "hermes": Family(HERMES, [], ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
    "qwen3_coder": Family(QWEN_CODER, [], ["<tool_call>", "</tool_call>"]),
    "deepseek": Family(
        DEEPSEEK,
        [
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<｜User｜>", "<｜Assistant｜>"),
        ],
        ["<think>", "</think>"],
    ),
    "harmony": Family(
        HARMONY,
        [
            *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ],
    ),
}


@pytest.fixture
def family() -> str:
    """Tests ask for another by parametrising this."""
    return "hermes"


@pytest.fixture
def model_directory(tmp_path: Path, family: str) -> Path:
    told = FAMILIES[family]
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(told.special)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(m, special=False, normalized=False) for m in told.markup]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ends = [tokenizer.token_to_id(end) for end in ("<|im_end|>", "<|call|>", "<|return|>")]
    size = tokenizer.get_vocab_size()
    config = {**CONFIG, "vocab_size": size, "max_position_embeddings": 4096}
    known = [end for end in ends if end is not None]
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": known}))
    (tmp_path / "chat_template.jinja").write_text(told.template, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return tmp_path


@pytest.fixture
def language(model_directory: Path) -> Language:
    return Language(model_directory)
