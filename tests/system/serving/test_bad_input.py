"""Bad input gets a clear answer that names what is wrong."""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.cli.machine.ports import hold_port, number_of
from tests.suites import MOESAIC
from tests.waiting import HANG_S


def refused(directory: Path, *flags: str, **environment: str) -> str:
    done = subprocess.run(
        [str(MOESAIC), "up", *flags],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode not in (0, -9), done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr + done.stdout


def test_a_directory_that_is_no_checkpoint(tmp_path: Path) -> None:
    assert "config.json" in refused(tmp_path, "--model", str(tmp_path), "--port", "0")


def test_a_truncated_shard_is_named(tmp_path: Path, demo: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo, model)
    shard = model / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:1_000_000])

    assert "model.safetensors" in refused(tmp_path, "--model", str(model), "--port", "0")


def test_bad_words_of_prompts_are_named(tmp_path: Path, demo: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo, model)
    words = {"version": "mine", "templates": {"multi": "{label}? {text}"}}
    (model / "moesaic.json").write_text(json.dumps({"wording": words}))

    said = refused(tmp_path, "--model", str(model), "--port", "0")

    assert "moesaic.json: wording.templates.multi: must have {instruction}" in said


def test_a_port_in_use_is_named(tmp_path: Path, demo: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        said = refused(tmp_path, "--model", str(demo), "--port", port)

    assert port in said
    assert "--port" in said


@pytest.mark.parametrize("url", ["redis://127.0.0.1:{port}/0", "http://127.0.0.1/", "nonsense"])
def test_a_wrong_redis_url_is_named(tmp_path: Path, demo: Path, url: str) -> None:
    with hold_port("127.0.0.1") as held:  # where nobody listens
        wrong = url.format(port=number_of(held))
        said = refused(tmp_path, "--model", str(demo), "--port", "0", REDIS_URL=wrong)

    assert "REDIS_URL" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said_of_it"),
    [
        (("--topology", "edge", "--memory", "10M,40M,80M"), "memory_bytes: leaves no room"),
        (("--topology", "gathered", "--expert-memory-bytes=9"), "expert_memory_bytes: 9 bytes"),
    ],
)
def test_memory_that_is_never_enough_ends_the_suite_at_once(
    tmp_path: Path, demo: Path, flags: tuple[str, ...], said_of_it: str
) -> None:
    said = refused(tmp_path, "--model", str(demo), "--port", "0", *flags)

    assert said_of_it in said
    assert "starts again" not in said


def test_one_service_alone_says_what_it_lacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(MOESAIC), "serve", "expert", "--kv-blocks", "7"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert done.returncode == 2
    assert "kv-blocks" in done.stderr


@pytest.fixture
def client(disaggregated: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{disaggregated.url}/v1", api_key="unused", max_retries=0)


def test_an_unknown_model_is_a_404_that_says_which_is_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="gpt-17", prompt="x", max_tokens=1)

    assert refusal.value.code == "model_not_found"
    assert "demo" in str(refusal.value)


def test_a_prompt_of_ten_megabytes_is_refused_before_it_is_read(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        client.completions.create(model="demo", prompt="word " * 2_000_000, max_tokens=1)

    assert refusal.value.status_code == 413
    assert refusal.value.code == "request_too_large"


def test_a_prompt_longer_than_the_context_is_told_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model="demo", prompt="word " * 5000, max_tokens=1)

    assert refusal.value.code == "context_length_exceeded"
    assert "2048" in str(refusal.value)


@pytest.mark.parametrize("labels", [[], ["one"], ["same", "same"], [1, 2], "banking"])
def test_bad_labels_are_named(disaggregated: Any, labels: Any) -> None:
    with disaggregated.client() as http:
        answer = http.post("/v1/classify", json={"model": "demo", "input": "x", "labels": labels})

    assert answer.status_code == 400
    assert "labels" in json.dumps(answer.json()["error"])
