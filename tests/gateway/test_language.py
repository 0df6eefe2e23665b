"""What a checkpoint's maker says about serving it is read, and checked."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from moesaic.errors import CheckpointError, InvalidInput
from moesaic.services.gateway.language import Language
from tests.processes import children

DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for path in DEMO.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_the_order_of_methods_comes_from_the_model_directory(directory: Path) -> None:
    (directory / "moesaic.json").write_text('{"classify_methods": ["sequence"]}')

    assert Language(directory).classify_methods == ("sequence",)


def test_without_the_file_the_cheapest_method_comes_first(directory: Path) -> None:
    (directory / "moesaic.json").unlink()

    assert Language(directory).classify_methods == ("token", "choice", "sequence")


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"classify_methods": []}', '{"classify_methods": ["x"]}', '{"wording": {}}'),
        *('{"classify_methods": [[]]}', '{"classify_methods": 7}', '{"wording": {"version": []}}'),
    ],
)
def test_a_bad_file_is_named(directory: Path, text: str) -> None:
    (directory / "moesaic.json").write_text(text)

    with pytest.raises(CheckpointError, match=r"moesaic\.json"):
        Language(directory)


def test_the_words_of_prompts_come_from_the_model_directory(directory: Path) -> None:
    own = {"version": "mine", "words": {"instruction": "Sort it."}}
    (directory / "moesaic.json").write_text(json.dumps({"wording": own}))

    wording = Language(directory).dialogue.wording

    assert wording.version.startswith("mine+")
    assert wording.words["instruction"] == "Sort it."


def test_the_tokenizer_s_description_has_plain_tokens_and_the_template(directory: Path) -> None:
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": {"content": "<|im_end|>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")

    assert Language(directory).tokenizer_info == {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "chat_template": "{{ messages[0].content }}",
    }


def test_the_description_of_the_tokenizer_has_all_templates(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")

    named = Language(directory).tokenizer_info["chat_template"]

    assert [*map(dict, named)] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]


async def test_clients_can_ask_for_the_tokenizer_s_description(open_house, language) -> None:
    async with open_house() as house:
        answer = (await house.client.get("/tokenizer_info")).json()

    assert answer == language.tokenizer_info
    assert answer["eos_token"] == "<|im_end|>"


async def test_a_template_that_is_not_rendered_holds_nobody_else(open_house, language) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    async with open_house() as house:
        before = (await house.client.post("/tokenize", json=asked)).json()
        stopped = children("moesaic.models.text.rendering")
        for helper in stopped:
            os.kill(helper, signal.SIGSTOP)
        stuck = asyncio.create_task(house.client.post("/tokenize", json=asked))
        while (await house.client.get("/v1/models")).status_code == 200 and not stuck.done():
            pass  # the loop answers others meanwhile
        answers = [await stuck]
        while answers[-1].status_code == 503 and len(answers) <= len(stopped):
            answers.append(await house.client.post("/tokenize", json=asked))

    refused, after = answers[:-1], answers[-1]  # a helper that is stopped costs one request
    assert {(each.status_code, each.headers["retry-after"]) for each in refused} == {(503, "1")}
    assert after.json() == before


def test_a_shorter_context_refuses_longer_texts(directory: Path) -> None:
    language = Language(directory, max_model_len=20)
    assert language.max_tokens == 20
    with pytest.raises(InvalidInput, match="this model's maximum context length is 20 tokens"):
        language.encode_prompt("a long story about rain " * 20, "prompt", add_special_tokens=True)
