"""The figures of a load: exact for known times, and true for a server that writes down what it did when."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.cli.load.generator import TimedRequest
from moesaic.cli.load.report import report_of
from moesaic.cli.load.table import table_of
from tests.cli.conftest import Run
from tests.http_servers import JsonHandler, JsonServer, serving
from tests.waiting import HANG_S

POOL = list(range(100, 140))
# Keys of the file that vLLM writes, without --save-detailed.
OF_VLLM = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms"),
}


class Server(JsonServer):
    """Streams as many tokens as are asked for, and writes down when it did; prompts may be refused or held."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.log: list[
            tuple[float, list[float]]
        ] = []  # when each request came, and its tokens left
        self.now = self.most = 0
        self.together = threading.Barrier(1)  # requests that are answered when so many have come
        self.tokenizes, self.refuses, self.counts = True, False, True


class Handler(JsonHandler):
    server: Server

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "org/fake"}]})

    def do_POST(self) -> None:
        came = time.perf_counter()
        body = self.body()
        server = self.server
        if self.path == "/tokenize":
            known = {"tokens": POOL[: len(body["prompt"].split())]}
            self.answer(*((200, known) if server.tokenizes else (404, {})))
        elif self.path == "/detokenize":
            self.answer(200, {"prompt": " ".join(map(str, body["tokens"]))})
        elif server.refuses:
            self.answer(503, {"error": {"message": "overloaded"}})
        else:
            with server.lock:
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                server.now += 1
                server.most = max(server.most, server.now)
            server.together.wait(HANG_S)
            left = self._stream(body)
            with server.lock:
                server.now -= 1
                server.log.append((came, left))
            self.event("[DONE]")

    def _stream(self, body: dict[str, Any]) -> list[float]:
        chat, left = "messages" in body, []
        count = body["max_completion_tokens" if chat else "max_tokens"]
        self.send_response(200)
        self.end_headers()
        if chat:
            self.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(count):
            left.append(time.perf_counter())
            self.event({"choices": [{"delta": {"content": "x"}} if chat else {"text": "x"}]})
        if self.server.counts:
            prompt = body["messages"][0]["content"].split() if chat else body["prompt"]
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
            self.event({"choices": [], "usage": usage})
        return left


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        yield server


def answered(number: int, sent_s: float, times: list[float], tokens: int, end_s: float) -> Any:
    return TimedRequest(
        number,
        due_s=0.0,
        sent_s=sent_s,
        status=200,
        end_s=end_s,
        complete=True,
        text_times=times,
        answered_s=times[-1],
        usage={"prompt_tokens": 10 * (number + 1), "completion_tokens": tokens},
    )


def test_known_times_give_known_figures() -> None:
    failed = TimedRequest(2, 0.0, sent_s=0.5, status=503, end_s=0.6, error="status 503: no")
    requests = [
        answered(0, 0.0, [0.1, 0.2, 0.4], 3, 0.5),
        answered(1, 0.4, [0.7, 1.7], 5, 1.8),  # four tokens came together
        failed,
    ]

    found = report_of(requests, [1, 1, 1], 2.0, [50, 99.5], {"ttft": 150, "tpot": 200})

    assert (found["completed"], found["failed"], found["duration"]) == (2, 1, 2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 8)
    assert (found["request_throughput"], found["output_throughput"]) == (1.0, 4.0)
    assert (found["total_token_throughput"], found["request_goodput"]) == (19.0, 0.5)
    assert found["ttfts"] == pytest.approx([0.1, 0.3, 0.0])
    assert found["itls"][0] == pytest.approx([0.1, 0.2])
    assert found["latencies"] == pytest.approx([0.4, 1.3, 0.0])
    assert found["queue_times"] == pytest.approx([0.0, 0.4, 0.5])
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["p50_tpot_ms"] == pytest.approx((150 + 250) / 2)
    assert found["median_itl_ms"] == pytest.approx(200)
    assert found["mean_e2el_ms"] == pytest.approx(850)
    assert found["p99.5_e2el_ms"] == pytest.approx(400 + 0.995 * 900)
    # The second request is sent when the first has its last token.
    assert found["max_concurrent_requests"] == 1
    assert found["max_output_tokens_per_s"] == 4
    assert found["errors"] == ["", "", "status 503: no"]


def test_the_table_is_that_of_vllm() -> None:
    found = report_of([answered(0, 0.0, [0.1, 0.2], 2, 0.5)], [1], 2.0, [99], {})

    assert table_of(found, ["ttft"], [99], 4.0, 8).splitlines() == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     1",
        "Failed requests:                         0",
        "Maximum request concurrency:             8",
        "Request rate configured (RPS):           4.00",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      10",
        "Total generated tokens:                  2",
        "Request throughput (req/s):              0.50",
        "Output token throughput (tok/s):         1.00",
        "Peak output token throughput (tok/s):    2.00",
        "Peak concurrent requests:                1.00",
        "Total token throughput (tok/s):          6.00",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          100.00",
        "Median TTFT (ms):                        100.00",
        "P99 TTFT (ms):                           100.00",
        "==================================================",
    ]


def test_no_answer_at_all_gives_figures_too() -> None:
    failed = TimedRequest(0, 0.0, error="x")

    found = report_of([failed], [1], 1.0, [99], {"e2el": 1})

    assert (found["completed"], found["p99_e2el_ms"], found["request_goodput"]) == (0, 0.0, 0.0)


RAMP = ("--ramp-up-strategy", "exponential")
SIZES = ("--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "4")


def measured(
    ask: Run, house: Path, server: Server, *flags: str, **env: str
) -> tuple[dict[str, Any], str]:
    saving = ("--save-result", "--save-detailed", "--result-filename", "result.json")
    done = ask("bench", "serve", server.url, *saving, *flags, **env)
    assert done.returncode == 0, done.stderr
    return json.loads((house / "result.json").read_text()), done.stdout


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_figures_agree_with_what_the_server_wrote_down(
    ask: Run, house: Path, server: Server, backend: str
) -> None:
    flags = ("--backend", backend, "--percentile-metrics", "ttft,itl,e2el")
    found, shown = measured(ask, house, server, *SIZES, *flags, "--metric-percentiles", "50,90")

    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (6 * 8, 6 * 4)
    assert found["output_lens"] == [4] * 6
    assert [len(gaps) for gaps in found["itls"]] == [3] * 6
    assert found["generated_texts"] == ["xxxx"] * 6
    # No token is seen before it was sent, and no request comes before it left.
    least = sorted(left[0] - came for came, left in server.log)
    assert all(seen >= sent for seen, sent in zip(sorted(found["ttfts"]), least, strict=True))
    assert found["duration"] >= max(found["latencies"])
    for name, values in (
        ("ttft", found["ttfts"]),
        ("e2el", found["latencies"]),
        ("itl", [gap for gaps in found["itls"] for gap in gaps]),
    ):
        for percentile in (50, 90):
            expected = np.percentile(np.array(values) * 1000, percentile)
            assert found[f"p{percentile}_{name}_ms"] == pytest.approx(expected)
            assert f"P{percentile} {name.upper()} (ms):" in shown
    assert found["request_throughput"] == pytest.approx(6 / found["duration"])
    assert all(body["ignore_eos"] and body["model"] == "org/fake" for body in server.bodies)
    ids = sorted(headers["x-request-id"] for headers in server.headers)
    assert [each.rpartition("-")[2] for each in ids] == ["0", "1", "2", "3", "4", "5"]


def test_a_file_has_the_keys_of_vllm_and_its_name(ask: Run, house: Path, server: Server) -> None:
    (house / "results").mkdir()
    done = ask("bench", "serve", server.url, *SIZES, "--save-result", "--result-dir", "results")

    assert done.returncode == 0, done.stderr
    [file] = (house / "results").iterdir()
    found = json.loads(file.read_text())
    assert found.keys() >= OF_VLLM
    assert not {"ttfts", "generated_texts"} & found.keys()
    assert file.name.startswith("openai-infqps-fake-")
    assert found["request_rate"] == "inf"


def test_results_are_appended_with_notes_as_vllm_writes_them(
    ask: Run, house: Path, server: Server
) -> None:
    (house / "all.json").write_text('{"of": "vllm"}')
    rates = ("--ramp-up-start-rps", "50", "--ramp-up-end-rps", "53.5")
    more = ("--metadata", "tp=2", "backend=b=c", "--label", "mine", "--append-result")
    for strategy in ("linear", "exponential"):
        ramp = ("--ramp-up-strategy", strategy, *rates, "--result-filename", "all.json")
        done = ask("bench", "serve", *more, server.url, *ramp, *SIZES)
        assert done.returncode == 0, done.stderr

    first, *found = map(json.loads, (house / "all.json").read_text().splitlines())

    assert first == {"of": "vllm"}
    assert [each["ramp_up_strategy"] for each in found] == ["linear", "exponential"]
    for each in found:
        assert (each["tp"], each["backend"], each["label"]) == ("2", "b=c", "mine")
        assert (each["ramp_up_start_rps"], each["ramp_up_end_rps"]) == (50, 53.5)
        assert [change["rps"] for change in each["rps_change_events"]] == [50, 51, 52, 53]
        assert (each["completed"], len(each["latencies"])) == (6, 6)
        assert not {"ttfts", "errors"} & each.keys()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("--request-rate", "900", "--max-concurrency", "2"), "openai-900.0qps-concurrency2-fake-"),
        (
            (*RAMP, "--ramp-up-start-rps", "800", "--ramp-up-end-rps", "900", "--label", "a"),
            "a-ramp-up-exponential-800qps-900qps-fake-",
        ),
    ],
)
def test_a_file_has_the_name_that_vllm_gives_it(
    ask: Run, house: Path, server: Server, flags: tuple[str, ...], name: str
) -> None:
    saved = ("--save-result", "--result-dir", "new/results")

    assert ask("bench", "serve", server.url, *SIZES, *saved, *flags).returncode == 0

    [file] = (house / "new/results").iterdir()
    assert file.name.startswith(name)


def test_several_targets_stand_behind_one_flag(ask: Run, house: Path, server: Server) -> None:
    goals = ("--goodput", "ttft:600000", "e2el:0", "--header", "x-a=1", "x-b=2")
    found, _ = measured(ask, house, server, *SIZES, *goals)

    assert found["request_goodput"] == 0
    assert {(each["x-a"], each["x-b"]) for each in server.headers} == {("1", "2")}


def test_the_wait_for_a_turn_is_a_metric_of_its_own(ask: Run, house: Path, server: Server) -> None:
    metrics = "e2el_including_client_queue,client_queue_time"
    flags = ("--max-concurrency", "1", "--percentile-metrics", metrics, "--request-rate", "1000")
    found, shown = measured(ask, house, server, *SIZES, *flags)

    waited, took = np.array(found["queue_times"]), np.array(found["latencies"])
    assert found["mean_client_queue_time_ms"] == pytest.approx(waited.mean() * 1000)
    both = np.percentile(waited + took, 99) * 1000
    assert found["p99_e2el_including_client_queue_ms"] == pytest.approx(both)
    assert shown.index("Client-side Queueing") < shown.index("Queue-inclusive End-to-end Latency")


def test_a_trace_is_replayed_at_its_own_times(ask: Run, house: Path, server: Server) -> None:
    rows = [(5.0, 3, 2), (5.1, 4, 1), (5.4, 5, 3)]
    lines = ["timestamp_s,input_tokens,output_tokens", *(f"{a},{b},{c}" for a, b, c in rows)]
    (house / "trace.csv").write_text("\n".join(lines) + "\n")
    flags = ("--dataset-name", "timed_trace", "--dataset-path", "trace.csv")

    found, _ = measured(ask, house, server, *flags, "--timed-trace-sec-multiplier", "2")

    due = np.array(found["start_times"]) - np.array(found["queue_times"])
    assert due == pytest.approx([0, 0.2, 0.8])
    asked = sorted((len(body["prompt"]), body["max_tokens"]) for body in server.bodies)
    assert asked == [(3, 2), (4, 1), (5, 3)]
    assert all(body["ignore_eos"] for body in server.bodies)


def test_no_more_requests_are_in_flight_than_allowed_and_as_many(
    ask: Run, house: Path, server: Server
) -> None:
    server.together = threading.Barrier(3)  # fewer would wait for ever

    found, _ = measured(ask, house, server, *SIZES, "--max-concurrency", "3")

    assert server.most == 3
    assert found["max_concurrent_requests"] <= 3
    assert found["max_concurrency"] == 3


def test_the_same_seed_asks_the_same(ask: Run, house: Path, server: Server) -> None:
    flags = (*SIZES, "--random-range-ratio", "0.5", "--max-concurrency", "1")
    for seed in ("1", "1", "2"):
        measured(ask, house, server, *flags, "--seed", seed)

    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[:6] == prompts[6:12] != prompts[12:]
    assert {4 <= len(prompt) <= 12 for prompt in prompts} == {True}
    assert all(set(prompt) <= set(POOL) for prompt in prompts)


def test_requests_that_warm_up_are_not_counted(ask: Run, house: Path, server: Server) -> None:
    found, _ = measured(ask, house, server, *SIZES, "--num-warmups", "2")

    assert (found["completed"], len(server.bodies)) == (6, 8)


def test_a_server_without_tokens_or_usage_is_measured_too(
    ask: Run, house: Path, server: Server
) -> None:
    server.tokenizes = server.counts = False

    found, _ = measured(ask, house, server, *SIZES)

    assert all(len(body["prompt"].split()) == 8 for body in server.bodies)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (48, 24)


def test_headers_keys_and_further_fields_reach_the_server(
    ask: Run, house: Path, server: Server
) -> None:
    more = ("--header", "x-a=1=2", "--extra-body", '{"top_k": 5}', "--temperature", "0")
    named = ("--model", "org/own", "--served-model-name", "alias", "--top-k", "7", "--top-p", "0.5")
    found, _ = measured(ask, house, server, *SIZES, *more, *named, MOESAIC_API_KEY="key")

    assert found["model_id"] == "org/own"
    assert {(body["model"], body["top_p"]) for body in server.bodies} == {("alias", 0.5)}

    assert {each["x-a"] for each in server.headers} == {"1=2"}
    assert {each["Authorization"] for each in server.headers} == {"Bearer key"}
    assert {(body["top_k"], body["temperature"]) for body in server.bodies} == {(5, 0)}


def test_prompts_come_from_files(ask: Run, house: Path, server: Server) -> None:
    turns = [
        {"from": "human", "value": "hi to you all"},
        {"from": "gpt", "value": "one two three four"},
    ]
    (house / "share.json").write_text(json.dumps([{"conversations": turns}, {"conversations": []}]))
    (house / "own.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b", "output_tokens": 2}\n')

    def asked(kind: str, file: str, *flags: str) -> list[tuple[str, int]]:
        server.bodies.clear()
        named = ("--dataset-name", kind, "--dataset-path", file, "--num-prompts", "4")
        measured(ask, house, server, *named, *flags)
        assert not any("ignore_eos" in body for body in server.bodies)
        return sorted((body["prompt"], body["max_tokens"]) for body in server.bodies)

    assert asked("sharegpt", "share.json") == [("hi to you all", 4)] * 4
    assert asked("sharegpt", "share.json", "--no-oversample") == [("hi to you all", 4)]
    assert asked("custom", "own.jsonl") == [("a", 256)] * 2 + [("b", 256)] * 2
    assert asked("custom", "own.jsonl", "--output-len", "1") == [("a", 1)] * 2 + [("b", 1)] * 2


def test_a_load_without_any_answer_is_a_failure(ask: Run, server: Server) -> None:
    server.refuses = True

    done = ask("bench", "serve", server.url, *SIZES)

    assert done.returncode == 1
    assert "Failed requests:                         6" in done.stdout
    assert "6 requests failed, the first one: status 503" in done.stderr
    assert "overloaded" in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--percentile-metrics", "ttft,tp"), "--percentile-metrics tp: give some of ttft"),
        (("--metric-percentiles", "50,101"), "--metric-percentiles 101: give numbers"),
        (("--metric-percentiles", ","), "--metric-percentiles: is empty"),
        (("--goodput", "itl:5"), "--goodput itl:5: write NAME:MS"),
        (("--goodput", "ttft:5 tpot:-1"), "--goodput tpot:-1: write NAME:MS"),
        (("--header", "x"), "--header: write KEY=VALUE"),
        (("--header", "x=a\nb: c"), "--header: write KEY=VALUE"),
        (("--extra-body", "[]"), "--extra-body: write a JSON object"),
        (("--request-rate", "0"), "--request-rate: must be above 0"),
        (("--burstiness", "nan"), "--burstiness: must be above 0"),
        (("--dataset-name", "custom"), "--dataset-path: --dataset-name custom needs a file"),
        (("--dataset-name", "custom", "--dataset-path", "none"), "none: No such file"),
        (("--dataset-name", "sharegpt", "--dataset-path", "bad"), "must be a JSON list of"),
        (("--dataset-name", "custom", "--dataset-path", "bad"), "bad:1: must be an object such as"),
        (("--save-result", "--result-dir", "bad"), "--result-dir bad: File exists"),
        (("--dataset-path", "bad"), "--dataset-path: --dataset-name random reads no file"),
        (("--random-range-ratio", '{"input": 0.3}'), "--random-range-ratio: write a number"),
        (("--random-range-ratio", "1"), "--random-range-ratio: write a number"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-strategy: give --ramp-up-start-rps and"),
        (("--ramp-up-end-rps", "5"), "--ramp-up-strategy: give it with the rates"),
        (
            (*RAMP, "--ramp-up-start-rps", "5", "--ramp-up-end-rps", "4"),
            "--ramp-up-end-rps: must be finite and at least 5, got 4",
        ),
        (
            (*RAMP, "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "4"),
            "--ramp-up-start-rps: must be above 0",
        ),
        (
            (*RAMP, "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "4", "--request-rate", "3"),
            "--request-rate: leave it out",
        ),
        (("--self-timed",), "--self-timed: is only for --dataset-name timed_trace"),
        (
            ("--dataset-name", "timed_trace", "--dataset-path", "bad", "--request-rate", "3"),
            "--request-rate: a timed_trace has its own times",
        ),
        (
            ("--dataset-name", "timed_trace", "--dataset-path", "short.csv"),
            "--dataset-path short.csv: output_tokens: must be a number in each row",
        ),
        (
            ("--dataset-name", "prefix_repetition", "--num-prompts", "3"),
            "--prefix-repetition-num-prefixes: must be 3 at most, got 10",
        ),
        (("--random-batch-size", "2"), "--random-batch-size: is only for random prompts of"),
        (
            ("--backend", "openai-embeddings", "--goodput", "e2el:1"),
            "--goodput: embeddings have no",
        ),
        (("--metadata", "note"), "--metadata: write KEY=VALUE"),
        (("--tokenizer", "none"), "--tokenizer none: No such file"),
    ],
)
def test_a_wrong_option_is_refused_before_any_request(
    ask: Run, house: Path, server: Server, flags: tuple[str, ...], says: str
) -> None:
    (house / "bad").write_text("{")
    (house / "short.csv").write_text("timestamp_s,input_tokens\n0,3\n")

    done = ask("bench", "serve", server.url, *flags)

    assert done.returncode == 2
    assert says in done.stderr
    assert server.bodies == []


def test_an_address_that_is_none_is_refused(ask: Run) -> None:
    assert ask("bench", "serve", "127.0.0.1:80", *SIZES).returncode != 0
    assert ask("bench", "serve", "http://127.0.0.1:9", *SIZES).returncode == 3
