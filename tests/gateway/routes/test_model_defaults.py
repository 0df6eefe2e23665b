"""What a request leaves out is as the model's maker has it, in ``generation_config.json``."""

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.errors import CheckpointError
from moesaic.services.gateway.fields.defaults import read_defaults
from moesaic.services.gateway.language import Language
from tests.gateway.batches.batch_client import encoded, ended, line, submit, talk

MADE = {
    "do_sample": True,
    "temperature": 0.625,
    "top_k": 20,
    "top_p": 0.75,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "max_new_tokens": 9,
    "max_length": 4,  # prompt and answer, of another library's calls
    "top_a": 0.5,
}
SAMPLED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
CHAT = {"messages": [{"role": "user", "content": "a"}]}


@pytest.fixture
def made(model_directory: Path, tmp_path: Path):
    """The model with other fields in its ``generation_config.json``."""
    directory = tmp_path / "made"
    shutil.copytree(model_directory, directory)

    def write(fields: dict[str, Any]) -> Path:
        (directory / "generation_config.json").write_text(json.dumps(fields))
        return directory

    return write


def told(generation: Any) -> dict[str, Any]:
    return {name: getattr(generation.sampling, name) for name in SAMPLED}


@pytest.mark.parametrize(
    ("route", "body", "max_tokens"),
    [
        ("/v1/chat/completions", CHAT, 9),
        ("/v1/completions", {"prompt": "a"}, 9),  # of 9 and the route's 16
    ],
)
async def test_a_request_without_fields_has_the_models(
    open_house, scripts, made, route: str, body: dict[str, Any], max_tokens: int
) -> None:
    async with open_house(scripts.says("yes"), language=Language(made(MADE))) as house:
        await house.client.post(route, json=body)
        [submit_] = house.workers[0].submits

    assert told(submit_.generation) == {name: MADE[name] for name in SAMPLED}
    assert submit_.generation.max_tokens == max_tokens
    assert submit_.generation.sampling.presence_penalty == 0


async def test_what_a_request_says_goes_over_the_models(open_house, scripts, made) -> None:
    said = {
        "temperature": 0,
        "top_k": -1,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "max_tokens": 12,
    }
    async with open_house(scripts.says("yes"), language=Language(made(MADE))) as house:
        await house.client.post("/v1/completions", json={"prompt": "a", **said})
        await house.client.post("/v1/chat/completions", json={**CHAT, "top_k": 5})
        [first, second] = house.workers[0].submits

    assert told(first.generation) == {
        "temperature": 0,
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
    }
    assert first.generation.max_tokens == 12
    assert told(second.generation) == {name: MADE[name] for name in SAMPLED} | {"top_k": 5}


async def test_batches_have_them_too(open_house, scripts, made, tmp_path: Path) -> None:
    def work(client: openai.OpenAI) -> None:
        ended(client, submit(client, encoded(line("a"))))

    files = str(tmp_path / "files")
    opened = open_house(scripts.says("yes"), language=Language(made(MADE)), files_dir=files)
    async with opened as house:
        await talk(house, work)
        [submit_] = house.workers[0].submits

    assert told(submit_.generation) == {name: MADE[name] for name in SAMPLED}


def test_as_vllm_has_it_a_file_without_temperature_leaves_one_of_one(made) -> None:
    """``do_sample`` is of ``transformers``' calls; nulls say nothing."""
    defaults = read_defaults(made({"do_sample": False, "top_k": None, "top_p": 0.5}))

    assert defaults.model_dump(exclude_unset=True) == {"top_p": 0.5}
    sampling = defaults.sampling(0, ())
    assert (sampling.temperature, sampling.top_k) == (1, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", "0.7"),
        ("top_p", 1.5),
        ("top_p", True),
        ("top_k", 2.5),
        ("min_p", 2),
        ("repetition_penalty", [1]),
        ("max_new_tokens", 0),
    ],
)
def test_a_field_that_is_not_valid_is_named_with_its_file(made, name: str, value: Any) -> None:
    directory = made({**MADE, name: value})

    with pytest.raises(
        CheckpointError, match=rf"generation_config.json: {name}: .*--generation-config none"
    ):
        read_defaults(directory)


async def test_a_gateway_may_be_told_to_pass_the_file_over(open_house, scripts, made) -> None:
    language = Language(made({**MADE, "top_p": 9}))
    opened = open_house(scripts.says("yes"), language=language, generation_config="none")
    async with opened as house:
        await house.client.post("/v1/completions", json={"prompt": "a"})
        [submit_] = house.workers[0].submits

    assert told(submit_.generation) == dict(zip(SAMPLED, (1, 0, 1, 0, 1), strict=True))
    assert submit_.generation.max_tokens == 16
