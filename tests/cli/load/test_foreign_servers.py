"""Servers of others, which answer as a script says: bytes that are odd, late or missing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.http_servers import JsonHandler, JsonServer, serving


class Foreign(JsonServer):
    """Answers with the bytes of a script, ``statuses`` first; it knows no tokens."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.script = [b'data: {"choices": [{"text": "x"}]}\n\n', b"data: [DONE]\n\n"]
        self.statuses: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.is_strict = False  # refuses fields that are newer than it


class Handler(JsonHandler):
    server: Foreign

    def do_GET(self) -> None:
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.answer(status, {"data": [{"id": "theirs"}]})

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/tokenize":
            return self.answer(404, {"detail": "Not Found"})
        self.server.bodies.append(body)
        if self.server.statuses:
            return self.answer(self.server.statuses.pop(0), {"error": {"message": "slow down"}})
        if self.server.is_strict and body.get("stream_options") is not None:
            return self.answer(400, {"error": {"message": "stream_options: unknown field"}})
        self.send_response(200)
        self.end_headers()
        for part in self.server.script:
            self.wfile.write(part)
            self.wfile.flush()


@pytest.fixture
def server() -> Iterator[Foreign]:
    with serving(Foreign()) as server:
        yield server


def measured(
    ask: Run, house: Path, server: Foreign, *flags: str, count: int = 1, status: int = 0
) -> dict[str, Any]:
    sizes = ("--random-input-len", "4", "--random-output-len", "2", "--num-prompts", str(count))
    saved = ("--save-result", "--save-detailed", "--result-filename", "result.json")
    done = ask("bench", "serve", server.url, *sizes, *saved, *flags)
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads((house / "result.json").read_text())
    return {**found, "stderr": done.stderr}


@pytest.mark.parametrize(
    ("script", "text", "tokens"),
    [
        ([b": ping\n\n", b'data: {"choices": [{"text": "ab"}]}\n\n', b"data: [DONE]\n\n"], "ab", 1),
        ([b'data: {"choices": [{"text": "a"}]}\r\n\r\n', b"data: [DONE]\r\n\r\n"], "a", 1),
        ([b'data:{"choices":[{"text":"a"}]}\n\ndata:{"choi', b'ces":[]}\n\ndata:[DONE]\n'], "a", 1),
        (
            [
                b'event: message\nid: 1\ndata: {"choices": [{"text": "a"}], "usage": null}\n\n',
                b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n',
            ],
            "a",
            1,
        ),
        ([b'\n{\n "choices": [{"text": "whole", "finish_reason": "stop"}]\n', b"}\n"], "whole", 1),
        (
            [
                b'data: {"choices": [{"text": "a"}]}\n\n',
                b"data: [DONE]\n\n",
                b'data: {"choices": [], "usage": {"completion_tokens": 7}}\n\n',
            ],
            "a",
            7,
        ),
    ],
    ids=["comments", "crlf", "no spaces", "no end but a reason", "no stream", "usage at last"],
)
def test_answers_in_unusual_forms_are_read(
    ask: Run, house: Path, server: Foreign, script: list[bytes], text: str, tokens: int
) -> None:
    server.script = script

    found = measured(ask, house, server)

    assert (found["completed"], found["generated_texts"]) == (1, [text])
    assert found["output_lens"] == [tokens]
    assert found["input_lens"] == [4]  # words, as nobody counts tokens


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (
            [
                b'data: {"choices": [{"text": "a"}]}\n\n',
                b'data: {"error": {"message": "boom"}}\n\n',
                b"data: [DONE]\n\n",
            ],
            "boom",
        ),
        ([b'data: {"choices": [{"text": "a"}]}\n\n'], "the answer broke off"),
        ([b"data: {]\n\n", b"data: [DONE]\n\n"], "the answer cannot be read"),
        ([], "the answer broke off"),
    ],
    ids=["an error in the stream", "no end", "no JSON", "nothing"],
)
def test_an_answer_that_is_not_whole_has_failed(
    ask: Run, house: Path, server: Foreign, script: list[bytes], error: str
) -> None:
    server.script = script

    found = measured(ask, house, server, status=1)

    assert (found["completed"], found["failed"]) == (0, 1)
    assert error in found["errors"][0]
    assert found["total_output_tokens"] == 0


def test_requests_that_are_refused_count_as_failed_and_others_do_not(
    ask: Run, house: Path, server: Foreign
) -> None:
    server.statuses = [200, 429, 429]  # the first is of the models

    found = measured(ask, house, server, "--max-concurrency", "1", count=4)

    assert (found["completed"], found["failed"]) == (2, 2)
    assert found["errors"][0].startswith("status 429")
    assert found["errors"][2:] == ["", ""]


def test_a_server_without_stream_options_can_be_measured(
    ask: Run, house: Path, server: Foreign
) -> None:
    server.is_strict = True
    refused = measured(ask, house, server, status=1)
    assert """add --extra-body '{"stream_options": null}'""" in refused["stderr"]

    found = measured(ask, house, server, "--extra-body", '{"stream_options": null}')

    assert (found["completed"], found["total_output_tokens"]) == (1, 1)


def test_a_server_that_is_not_ready_is_waited_for_if_asked(
    ask: Run, house: Path, server: Foreign
) -> None:
    server.statuses = [503, 200, 200, 503, 500]  # models, then answers

    found = measured(ask, house, server, "--ready-check-timeout-sec", "60")

    assert (found["completed"], found["failed"]) == (1, 0)


def test_a_server_that_never_is_ready_is_told(ask: Run, server: Foreign) -> None:
    server.statuses = [503] * 1000

    done = ask("bench", "serve", server.url, "--ready-check-timeout-sec", "1")

    assert done.returncode == 4
    assert "--ready-check-timeout-sec: the server is not ready: status 503" in done.stderr


def test_the_wait_for_models_counts_for_the_first_answer_too(ask: Run, server: Foreign) -> None:
    server.statuses = [503, 503, 503, 200] + [503] * 1000

    done = ask("bench", "serve", server.url, "--ready-check-timeout-sec", "2", "--model", "a")

    # Tries have pauses of half a second, and three of them have passed before the first answer.
    assert done.returncode == 4
    assert "the server is not ready" in done.stderr
    assert len(server.bodies) <= 2


def test_a_tokenizer_of_ones_own_draws_prompts_and_counts_answers(
    ask: Run, house: Path, server: Foreign
) -> None:
    server.script[0] = b'data: {"choices": [{"text": "the garden and the mill"}]}\n\n'
    demo = str(Path(__file__).parents[3] / "models/demo")

    found = measured(ask, house, server, "--tokenizer", demo)

    assert found["tokenizer_id"] == demo
    assert found["output_lens"][0] > 1
    [body] = server.bodies
    assert len(body["prompt"]) == 4
    assert all(type(token) is int for token in body["prompt"])


def test_embeddings_have_figures_of_their_own(ask: Run, house: Path, server: Foreign) -> None:
    server.script = [b'{"data": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}}']

    flags = ("--backend", "openai-embeddings", "--random-batch-size", "2", "--temperature", "0")
    found = measured(ask, house, server, *flags, count=6)

    assert (found["completed"], found["total_input_tokens"]) == (3, 27)
    assert (found["total_input_sequences"], found["input_lens"]) == (6, [9, 9, 9])
    assert found["input_sequence_throughput"] == pytest.approx(6 / found["duration"])
    assert found["mean_e2el_ms"] > 0
    assert not any(key in found for key in ("mean_ttft_ms", "output_throughput", "itls"))
    assert [sorted(body) for body in server.bodies] == [["input", "model"]] * 3
    assert {len(body["input"]) for body in server.bodies} == {2}
