"""The command against a small HTTP server that answers as the gateway does."""

import gzip
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.http_servers import JsonHandler, JsonServer, serving
from tests.waiting import HANG_S, eventually

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
URL = "/v1/chat/completions"


class Server(JsonServer):
    """Echoes prompts; some make trouble."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.prompts: list[Any] = []
        self.busy = 0  # requests to refuse first
        self.busy_status = 503
        self.locked = False
        self.hold = threading.Event()  # the prompt "slow" waits for it


class Handler(JsonHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status = 401 if self.server.locked else 200
        self.answer(status, {"data": [{"id": "demo"}]})

    def do_POST(self) -> None:
        body = self.body()
        if self.server.busy:
            self.server.busy -= 1
            error = {"error": {"message": "overloaded"}}
            self.answer(self.server.busy_status, error, {"Retry-After": "0"})
        elif self.path != URL:
            self.answer(404, {"error": {"message": f"no route POST {self.path}"}})
        elif body["prompt"] == "bad":
            self.answer(400, {"error": {"message": "prompt: too bad"}})
        else:
            if body["prompt"] == "slow":
                self.server.hold.wait(HANG_S)
            self.server.prompts.append(body["prompt"])
            usage = {"prompt_tokens": 3, "completion_tokens": 2}
            self.answer(200, {"text": body["prompt"], "usage": usage}, {"X-Request-Id": "req-7"})


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        yield server
        server.hold.set()


def line(custom_id: str, prompt: str = "hello", **more: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": URL,
        "body": {"prompt": prompt},
        **more,
    }


def encoded(lines: list[Any]) -> str:
    return "".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in lines)


def results(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def flags(server: Server, source: str = "in.jsonl", out: str = "out.jsonl") -> list[str]:
    return ["run-batch", "-i", source, "-o", out, "--url", server.url]


def test_every_request_is_answered_in_the_order_of_the_file(
    ask: Run, server: Server, house: Path
) -> None:
    (house / "in.jsonl").write_text(encoded([line(f"r{n}", f"text {n}") for n in range(50)]))

    done = ask(*flags(server), "--max-inflight", "8", "--json")

    assert done.returncode == 0, done.stderr
    found = results(house / "out.jsonl")
    assert [result["custom_id"] for result in found] == [f"r{n}" for n in range(50)]
    assert found[7]["response"] == {
        "status_code": 200,
        "request_id": "req-7",
        "body": {"text": "text 7", "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    }
    assert found[7]["error"] is None
    summary = json.loads(done.stdout)
    assert (summary["requests"], summary["completed"], summary["failed"]) == (50, 50, 0)
    assert (summary["prompt_tokens"], summary["completion_tokens"]) == (150, 100)
    assert [path.name for path in house.glob(".*")] == []


def test_bad_lines_are_named_and_the_others_are_answered(
    ask: Run, server: Server, house: Path
) -> None:
    (house / "in.jsonl").write_text(
        encoded(
            [
                line("a"),
                "{",
                line("a"),
                {"custom_id": "c", "method": "POST", "url": URL},
                line("d", "bad"),
                line("e", url="/v1/nothing"),
                line("f", body={"prompt": "x", "stream": True}),
                line("g"),
            ]
        )
    )

    done = ask(*flags(server))

    assert done.returncode == 1
    found = results(house / "out.jsonl")
    assert [r["custom_id"] for r in found] == ["a", None, "a", "c", "d", "e", "f", "g"]
    codes = [r["error"]["code"] if r["error"] else r["response"]["status_code"] for r in found]
    assert codes == [
        200,
        "invalid_json_line",
        "duplicate_custom_id",
        "missing_required_parameter",
        400,
        404,
        "unsupported_parameter",
        200,
    ]
    assert found[1]["error"]["line"] == 2
    assert "line 2: not a JSON object" in done.stderr
    assert "d: prompt: too bad" in done.stderr
    assert "6 of 8 requests failed" in done.stderr


def test_a_busy_server_is_asked_again(ask: Run, server: Server, house: Path) -> None:
    server.busy = 4
    (house / "in.jsonl").write_text(encoded([line("a"), line("b")]))

    assert ask(*flags(server)).returncode == 0
    assert len(server.prompts) == 2


@pytest.mark.parametrize(("status", "ends_with"), [(503, 1), (429, 0)])
def test_only_a_limit_that_time_brings_back_is_waited_for_as_long_as_it_takes(
    ask: Run, server: Server, house: Path, status: int, ends_with: int
) -> None:
    server.busy, server.busy_status = 8, status  # as often as a request is tried
    (house / "in.jsonl").write_text(encoded([line("a")]))

    assert ask(*flags(server)).returncode == ends_with


def test_what_was_stopped_goes_on_where_it_was(
    start: Start,
    ask: Run,
    server: Server,
    house: Path,
) -> None:
    lines = [line(f"r{n}", f"text {n}") for n in range(5)] + [line("late", "slow"), line("last")]
    (house / "in.jsonl").write_text(encoded(lines))
    process = start(*flags(server), "--max-inflight", "1")
    eventually(lambda: [p for p in house.glob(".*.partial") if p.read_text().count("\n") == 5])

    second = ask(*flags(server))
    process.send_signal(2)
    _, stderr = process.communicate()
    server.hold.set()
    server.prompts.clear()
    resumed = ask(*flags(server), "--json")

    assert second.returncode == 2
    assert "another run uses this file" in second.stderr
    assert process.returncode == 130
    assert "interrupted; repeat the command to continue" in stderr
    assert "Traceback" not in stderr
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["resumed"] == 5
    assert [prompt for prompt in server.prompts if prompt.startswith("text")] == []
    expected = [value["custom_id"] for value in lines]
    assert [result["custom_id"] for result in results(house / "out.jsonl")] == expected


def test_a_kill_loses_nothing_that_was_written(
    start: Start,
    ask: Run,
    server: Server,
    house: Path,
) -> None:
    lines = [line(f"r{n}") for n in range(5)] + [line("late", "slow")]
    (house / "in.jsonl").write_text(encoded(lines))
    process = start(*flags(server), "--max-inflight", "1")
    eventually(lambda: [p for p in house.glob(".*.partial") if p.read_text().count("\n") == 5])

    process.kill()
    process.wait()
    [partial] = house.glob(".*.partial")
    with partial.open("ab") as file:
        file.write(b'{"id": "half a li')
    server.hold.set()
    done = ask(*flags(server), "--json")

    assert json.loads(done.stdout)["resumed"] == 5
    assert [r["custom_id"] for r in results(house / "out.jsonl")] == [v["custom_id"] for v in lines]


def test_another_input_starts_from_its_beginning(ask: Run, server: Server, house: Path) -> None:
    (house / "in.jsonl").write_text(encoded([line("a", "new")]))
    (house / ".out.jsonl.0123456789abcdef.partial").write_text("of another input\n")

    assert ask(*flags(server)).returncode == 0
    assert server.prompts == ["new"]


def test_standard_input_and_output_and_compressed_files(
    ask: Run, server: Server, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = encoded([line("a"), line("b")]).encode()
    (house / "in.jsonl.gz").write_bytes(gzip.compress(text))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))

    piped = ask(*flags(server, "-", "-"))
    unpacked = ask(*flags(server, "in.jsonl.gz"))

    assert [json.loads(line)["custom_id"] for line in piped.stdout.splitlines()] == ["a", "b"]
    assert "2 requests in" in piped.stderr
    assert unpacked.returncode == 0
    assert len(results(house / "out.jsonl")) == 2


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["-i", "missing.jsonl", "-o", "out.jsonl"], 2, "--input-file missing.jsonl: "),
        (["-i", "in.jsonl", "-o", "none/out.jsonl"], 2, "--output-file none/out.jsonl: "),
        (["-i", "in.jsonl", "-o", "model"], 2, "--output-file model: it is a directory"),
        (["-i", "in.jsonl", "-o", "model/../in.jsonl"], 2, "in.jsonl: it is the input"),
        (
            ["-i", "in.jsonl", "-o", "-", "--json"],
            2,
            "--json: the results already use standard output",
        ),
        (["-i", "in.jsonl", "-o", "x", "--url", "http://127.0.0.1:1"], 3, "no answer from"),
    ],
)
def test_what_keeps_it_from_starting_is_named(
    ask: Run, server: Server, house: Path, arguments: list[str], status: int, says: str
) -> None:
    (house / "in.jsonl").write_text(encoded([line("a")]))
    address = [] if "--url" in arguments else ["--url", server.url]

    done = ask("run-batch", *arguments, *address)

    assert done.returncode == status
    assert says in done.stderr
    assert server.prompts == []


def test_without_the_right_key_nothing_begins(ask: Run, server: Server, house: Path) -> None:
    (house / "in.jsonl").write_text(encoded([line("a")]))
    server.locked = True

    done = ask(*flags(server))

    assert done.returncode == 1
    assert "requires an API key" in done.stderr


def test_a_gateway_that_goes_away_ends_the_run_and_the_next_one_goes_on(
    ask: Run, server: Server, house: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cli.files.requests_run.MAX_TRIES", 1)
    (house / "in.jsonl").write_text(encoded([line("a"), line("b")]))
    posted = Handler.do_POST

    def close(handler: Handler) -> None:
        handler.close_connection = True

    monkeypatch.setattr(Handler, "do_POST", close)
    lost = ask(*flags(server), "--max-inflight", "1")
    monkeypatch.setattr(Handler, "do_POST", posted)
    done = ask(*flags(server))

    assert lost.returncode == 3
    assert "is gone" in lost.stderr
    assert not lost.stderr.count("Traceback")
    assert done.returncode == 0
    assert len(results(house / "out.jsonl")) == 2
