"""The command against a small HTTP server that answers as the gateway does."""

import gzip
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http_servers import JsonHandler, JsonServer, serving
from tests.waiting import HANG_S, eventually

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]


class Server(JsonServer):
    """Classifies a text into the label it contains; some texts make trouble."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.locked = False  # every key is wrong
        self.busy = 0  # requests to refuse first
        self.broken = 0  # connections to close without an answer first
        self.hold = threading.Event()  # texts with "slow" wait for it


class Handler(JsonHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.locked:
            self.answer(401, {"error": {"message": "no key", "code": "invalid_api_key"}})
        else:
            self.answer(200, {"data": [{"id": "demo"}]})

    def do_POST(self) -> None:
        body = self.body()
        self.server.requests.append(body)
        self.server.keys.add(self.headers.get("Authorization"))
        text, labels = body["input"], body["labels"]
        if self.server.broken:
            self.server.broken -= 1
            self.close_connection = True
        elif self.server.busy:
            self.server.busy -= 1
            error = {"message": "overloaded", "code": "overloaded"}
            self.answer(503, {"error": error}, {"Retry-After": "0"})
        elif "slow" in text:
            self.server.hold.wait(HANG_S)
            self.close_connection = True
        elif "bad" in text:
            self.answer(400, {"error": {"message": "input: too bad", "code": "invalid_request"}})
        else:
            index = next(i for i, label in enumerate(labels) if label in text)
            probs = [0.9 if i == index else 0.1 / (len(labels) - 1) for i in range(len(labels))]
            ordered = sorted(zip(labels, probs, strict=True), key=lambda pair: -pair[1])
            entries = [{"label": label, "prob": prob} for label, prob in ordered]
            self.answer(
                200, {"data": [{"label": labels[index], "probs": probs, "labels": entries}]}
            )


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        yield server
        server.hold.set()


def write_rows(path: Path, rows: list[Any]) -> Path:
    lines = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def row(number: int, text: str, label: int | None = None) -> dict[str, Any]:
    known = {} if label is None else {"label": label}
    return {"id": f"r{number}", "text": text, "labels": ["cat", "dog"], **known}


def test_one_text_is_classified(ask: Run, server: Server) -> None:
    done = ask("classify", "a dog", "--labels", "cat, dog", "--url", server.url, "--json")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["label"] == "dog"
    assert server.requests == [
        {"model": "demo", "method": "auto", "input": "a dog", "labels": ["cat", "dog"]}
    ]


def test_the_answer_for_people_has_the_likeliest_label_first(ask: Run, server: Server) -> None:
    done = ask("classify", "a dog", "--labels", "cat,dog", MOESAIC_URL=server.url)

    assert done.stdout.index("dog") < done.stdout.index("cat")
    assert "0.9000" in done.stdout


def test_the_key_comes_from_the_environment(ask: Run, server: Server) -> None:
    ask("classify", "a dog", "--labels", "cat,dog", "--url", server.url, MOESAIC_API_KEY="k")

    assert server.keys == {"Bearer k"}


def test_a_key_that_is_missing_or_cannot_be_sent_is_named(ask: Run, server: Server) -> None:
    server.locked = True

    missing = ask("classify", "a dog", "--labels", "cat,dog", "--url", server.url)
    unsendable = ask("generate", "a dog", "--url", server.url, MOESAIC_API_KEY="\N{SNOWMAN}")

    assert (missing.returncode, unsendable.returncode) == (1, 2)
    assert "requires an API key; set MOESAIC_API_KEY" in missing.stderr
    assert unsendable.stderr.startswith("moesaic: MOESAIC_API_KEY: only printable ASCII")


@pytest.mark.parametrize(
    "command", [["classify", "\udcff", "--labels", "a,b"], ["generate", "\udcff"]]
)
def test_an_argument_that_is_no_text_is_wrong_use(ask: Run, command: list[str]) -> None:
    done = ask(*command)

    assert done.returncode == 2
    assert "not valid UTF-8" in done.stderr


def test_rows_that_are_no_text_do_not_stop_the_others(
    run: Run, server: Server, house: Path
) -> None:
    half = {"id": "\ud800", "text": "a \ud800 cat", "labels": ["cat", "dog"]}
    good = json.dumps(row(3, "a dog")).encode()
    lines = [json.dumps(half).encode(), b'{"text": "\xff"}', good]
    (house / "rows.jsonl").write_bytes(b"\n".join(lines))

    done = run("classify", "--file", "rows.jsonl", "--out", "out.jsonl", "--url", server.url)

    assert done.returncode == 0, done.stderr
    assert "row 2: not UTF-8: invalid start byte at byte 11 of the line" in done.stderr
    results = {r["id"]: r for r in map(json.loads, (house / "out.jsonl").open())}
    assert "half a surrogate pair" in results["\ud800"]["error"]["message"]
    assert results["r3"]["label"] == "dog"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_a_file_is_classified_and_judged(ask: Run, server: Server, house: Path, name: str) -> None:
    rows = [row(i, ["a cat", "a dog"][i % 2], label=i % 2) for i in range(40)]
    rows[0]["label"] = 1  # so one answer is wrong
    write_rows(house / name, rows)

    done = ask(
        "classify", "--file", name, "--out", "out.jsonl", "--url", server.url, "--json",
        "--instruction", "Which animal?", "--method", "token",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    results = {r["id"]: r for r in map(json.loads, (house / "out.jsonl").open())}
    assert (summary["rows"], summary["errors"], summary["accuracy"]) == (40, 0, 39 / 40)
    low, high = summary["interval_95"]
    assert low < 39 / 40 < high
    assert len(results) == 40
    assert results["r1"]["label"] == "dog"
    assert results["r1"]["correct"] is True
    assert results["r0"]["correct"] is False
    assert {(r["instruction"], r["method"]) for r in server.requests} == {
        ("Which animal?", "token")
    }


def test_rows_that_fail_are_reported_and_the_others_are_classified(
    ask: Run, server: Server, house: Path
) -> None:
    rows = [
        row(0, "a cat", 0),
        row(1, "bad"),
        "{not json",
        {"id": "r3", "labels": ["a", "b"]},
        row(4, "a dog", 7),
        row(5, "a dog", 1),
    ]
    write_rows(house / "rows.jsonl", rows)

    done = ask("classify", "--file", "rows.jsonl", "--out", "out.jsonl", "--url", server.url)

    assert done.returncode == 0
    assert "2 rows in" in done.stdout
    assert "4 errors" in done.stdout
    assert "accuracy 1.0000" in done.stdout
    assert "row r1: input: too bad" in done.stderr
    assert "row 3: not JSON" in done.stderr
    results = {r["id"]: r for r in map(json.loads, (house / "out.jsonl").open())}
    assert results["r1"]["error"] == {"code": "invalid_request", "message": "input: too bad"}
    assert "label: must be an index in 0..1, got 7" in results["r4"]["error"]["message"]


def test_a_busy_or_restarting_server_is_asked_again(ask: Run, server: Server, house: Path) -> None:
    server.busy, server.broken = 3, 2
    write_rows(house / "rows.jsonl", [row(i, "a cat", 0) for i in range(8)])

    done = ask("classify", "--file", "rows.jsonl", "--url", server.url, "--json")

    assert json.loads(done.stdout)["errors"] == 0
    assert len(server.requests) == 8 + 3 + 2


def test_the_limit_and_default_labels_hold(ask: Run, server: Server, house: Path) -> None:
    write_rows(house / "rows.jsonl", [{"text": "a dog"} for _ in range(9)])

    done = ask(
        "classify", "--file", "rows.jsonl", "--labels", "cat,dog", "--limit", "4",
        "--url", server.url, "--json",
    )  # fmt: skip

    summary = json.loads(done.stdout)
    assert (summary["rows"], summary["accuracy"]) == (4, None)


def test_ctrl_c_keeps_what_is_done(start: Start, server: Server, house: Path) -> None:
    write_rows(house / "rows.jsonl", [row(i, "a cat", 0) for i in range(5)] + [row(9, "slow")])
    process = start("classify", "--file", "rows.jsonl", "--out", "out.jsonl", "--url", server.url)
    out = house / "out.jsonl"
    eventually(lambda: out.exists() and out.read_text().count("\n") == 5)

    process.send_signal(2)
    stdout, stderr = process.communicate()

    assert process.returncode == 130
    assert "5 rows in" in stdout
    assert "Traceback" not in stderr
    assert len(out.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give either TEXT or --file"),
        (["text", "--file", "rows.jsonl"], "give either TEXT or --file"),
        (["text", "--labels", "one"], "--labels: give at least two"),
        (["--file", "missing.jsonl"], "--file missing.jsonl: "),
        (["--file", "rows.jsonl.gz"], "--file rows.jsonl.gz: "),
    ],
)
def test_wrong_use_is_named(ask: Run, house: Path, arguments: list[str], says: str) -> None:
    (house / "rows.jsonl.gz").write_text("not compressed")

    done = ask("classify", *arguments)

    assert done.returncode == 2
    assert says in done.stderr


def test_an_error_of_the_server_is_shown(ask: Run, server: Server) -> None:
    done = ask("classify", "bad", "--labels", "a,b", "--url", server.url)

    assert done.returncode == 1
    assert done.stderr == "moesaic: input: too bad\n"


@pytest.mark.parametrize(
    "command",
    [
        ["classify", "x", "--labels", "a,b", "--url"],
        ["generate", "x", "--url"],
        ["chat"],
        ["bench", "serve"],
    ],
)
def test_without_a_server_the_command_says_what_to_do(ask: Run, command: list[str]) -> None:
    done = ask(*command, "http://127.0.0.1:1")

    assert done.returncode == 3
    assert "no answer from http://127.0.0.1:1; start a suite with 'moesaic up'" in done.stderr
    # An option that all of them have.
    assert "set MOESAIC_URL" in done.stderr
