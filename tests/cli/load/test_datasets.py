"""Prompts of a load: their lengths, what they share, and when they are due."""

import gzip
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cli.load.datasets.drawn import random_prompts, repeated_prefixes
from moesaic.cli.load.datasets.files import file_prompts
from moesaic.cli.load.datasets.timed import timed_prompts
from moesaic.cli.load.datasets.vocabulary import ServerVocabulary
from moesaic.cli.load.options.prompts import PromptOptions
from moesaic.cli.terminal.outcome import CommandError
from moesaic.errors import InvalidInput
from tests.http_servers import JsonHandler, JsonServer, serving

POOL = list(range(100, 140))


def timed(path: Path, **options: Any) -> PromptOptions:
    return PromptOptions(dataset_name="timed_trace", dataset_path=path, **options)


def words(text: str) -> int:
    return len(text.split())


def test_random_lengths_fill_their_range_and_no_more() -> None:
    options = PromptOptions(
        num_prompts=2000,
        random_input_len=10,
        random_output_len=4,
        random_range_ratio='{"input": 0.5, "output": 0.25}',
        random_prefix_len=3,
    )

    made = random_prompts(options, POOL)

    assert {each.prompt_tokens for each in made} == set(range(8, 19))
    assert {each.answer_tokens for each in made} == {3, 4, 5}
    assert all(len(each.content) == each.prompt_tokens for each in made)
    assert len({tuple(each.content[:3]) for each in made}) == 1
    assert len({tuple(each.content[3:]) for each in made}) > 1900


def test_prefixes_are_shared_by_equally_many_prompts() -> None:
    options = PromptOptions(
        dataset_name="prefix_repetition",
        num_prompts=17,
        prefix_repetition_num_prefixes=5,
        prefix_repetition_prefix_len=6,
        prefix_repetition_suffix_len=2,
        prefix_repetition_output_len=9,
    )

    made = repeated_prefixes(options, POOL)

    # As vLLM does it, 17 // 5 of each.
    assert sorted(Counter(tuple(each.content[:6]) for each in made).values()) == [3] * 5
    assert {(each.prompt_tokens, each.answer_tokens) for each in made} == {(8, 9)}


def test_conversations_that_are_too_short_or_too_long_are_left_out(tmp_path: Path) -> None:
    pairs = [
        ("a b c", "a b c d"),
        ("a b c d", "a b c"),
        ("a b c d", "a b c d e"),
        ("a " * 1025, "a b c d"),
    ]
    rows = [{"conversations": [{"value": q}, {"value": a}]} for q, a in pairs]
    (file := tmp_path / "share.json").write_text(json.dumps(rows))

    def read(**options: Any) -> list[tuple[int, int]]:
        asked = PromptOptions(
            dataset_name="sharegpt", dataset_path=file, no_oversample=True, **options
        )
        made = file_prompts(asked, file, words)
        return sorted((each.prompt_tokens, each.answer_tokens) for each in made)

    assert read() == [(4, 5)]
    assert read(sharegpt_output_len=2) == [(4, 2), (4, 2)]
    assert read(sharegpt_output_len=2, output_len=1) == [(4, 1), (4, 1)]


def test_a_custom_file_tells_lengths_only_if_asked(tmp_path: Path) -> None:
    (file := tmp_path / "own.jsonl").write_text(
        '{"prompt": "a", "output_tokens": 3}\n{"prompt": "b", "output_tokens": 4}\n'
    )

    def read(**options: Any) -> list[tuple[Any, int]]:
        asked = PromptOptions(
            dataset_name="custom", dataset_path=file, num_prompts=3, disable_shuffle=True, **options
        )
        return [(each.content, each.answer_tokens) for each in file_prompts(asked, file, words)]

    assert read() == [("a", 256), ("b", 256), ("a", 256)]
    assert read(custom_output_len=-1) == [("a", 3), ("b", 4), ("a", 3)]
    assert read(no_oversample=True, output_len=5) == [("a", 5), ("b", 5)]
    file.write_text('{"prompt": "a"}\n')
    with pytest.raises(CommandError, match="must have output_tokens"):
        read(custom_output_len=-1)


def test_only_ends_of_lines_divide_a_custom_file(tmp_path: Path) -> None:
    texts = [f"a{odd}b" for odd in "\u2028\u2029\x85\x1c\x0b"]
    rows = (json.dumps({"prompt": text}, ensure_ascii=False) for text in texts)
    (file := tmp_path / "own.jsonl").write_text("\r\n".join(rows), encoding="utf-8")
    options = PromptOptions(
        dataset_name="custom",
        dataset_path=file,
        num_prompts=5,
        disable_shuffle=True,
        no_oversample=True,
    )

    assert [each.content for each in file_prompts(options, file, words)] == texts


ODD = ("1" * 400, "1" * 5000, "Infinity", "-Infinity", "NaN", "1e300", "[" * 100_000)


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd[:9] + str(len(odd)))
def test_what_python_cannot_hold_is_refused_in_every_file(tmp_path: Path, odd: str) -> None:
    (custom := tmp_path / "own.jsonl").write_text(f'{{"prompt": "a", "output_tokens": {odd}}}\n')
    (shared := tmp_path / "shared.json").write_text(f'[{{"conversations": {odd}}}]')
    (trace := tmp_path / "trace.jsonl").write_text(
        f'{{"timestamp": 0, "input_length": {odd}, "output_length": 1}}\n'
    )

    for name, file in (("custom", custom), ("sharegpt", shared)):
        options: Any = {"dataset_name": name, "dataset_path": file, "custom_output_len": -1}
        with pytest.raises(CommandError, match="dataset-path"):
            file_prompts(PromptOptions(**options), file, words)
    with pytest.raises(InvalidInput):
        timed_prompts(timed(trace), trace, POOL)


def test_times_that_are_infinitely_far_apart_are_refused(tmp_path: Path) -> None:
    (file := tmp_path / "trace.csv").write_text(
        "timestamp_s,input_tokens,output_tokens\n-1e308,1,1\n1e308,1,1\n"
    )

    with pytest.raises(InvalidInput, match="timestamp"):
        timed_prompts(timed(file), file, POOL)
    with pytest.raises(CommandError, match="timed-trace-sec-multiplier"):
        timed(file, timed_trace_sec_multiplier=math.inf)


def test_a_packed_trace_that_is_damaged_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"timestamp_s,input_tokens,output_tokens\n" * 99, mtime=0))
    packed[10] = 0xFF
    (file := tmp_path / "trace.csv.gz").write_bytes(packed)

    with pytest.raises(InvalidInput, match="cannot be read"):
        timed_prompts(timed(file), file, POOL)


@pytest.mark.parametrize(("status", "asked", "said"), [(400, 4, 1), (404, 2, 0)])
def test_a_text_that_is_refused_leaves_others_counted(
    status: int, asked: int, said: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(JsonHandler):
        def do_POST(self) -> None:
            prompts.append(prompt := self.body()["prompt"])
            refuses = prompt == "long"
            self.answer(*((status, {}) if refuses else (200, {"tokens": [1, 2]})))

    prompts: list[str] = []
    with serving(JsonServer(Refusing)) as server, httpx.Client(base_url=server.url) as client:
        vocabulary = ServerVocabulary(client, "theirs")
        counts = [len(vocabulary.tokens(text)) for text in ("a", "long", "b", "long")]

    assert counts == ([2, 0, 2, 0] if status == 400 else [2, 0, 0, 0])
    assert len(prompts) == asked
    assert capsys.readouterr().err.count("/tokenize refused a text") == said


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz", "trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_gives_times_and_lengths_in_every_form(tmp_path: Path, name: str) -> None:
    rows = [(7.5, 20, 4), (7.0, 10, 3), (9.0, 0, 0)]
    if ".csv" in name:
        lines = [
            "timestamp_s,input_tokens,output_tokens,client",
            *(f"{a},{b},{c},x" for a, b, c in rows),
        ]
    else:
        lines = [
            json.dumps({"timestamp": a, "input_length": b, "output_length": c}) for a, b, c in rows
        ]
    opening: Any = gzip.open if name.endswith("gz") else open
    with opening(tmp_path / name, "wt") as file:
        file.write("\n".join(lines) + "\n")

    made = timed_prompts(
        timed(tmp_path / name, timed_trace_sec_multiplier=0.5), tmp_path / name, POOL
    )

    assert [each.due_s for each in made] == [0, 0.25, 1.0]
    assert [(each.prompt_tokens, each.answer_tokens) for each in made] == [(10, 3), (20, 4), (1, 1)]
    assert all(len(each.content) == each.prompt_tokens for each in made)


def test_parts_of_one_name_have_the_same_tokens_in_every_request(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [
        {
            "timestamp": n,
            "input_length": rng.randint(1, 40),
            "output_length": 1,
            "hash_ids": [rng.randint(1, 4) for _ in range(rng.randint(0, 6))],
        }
        for n in range(200)
    ]
    (file := tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    made = timed_prompts(timed(file, timed_trace_chunk_hash_size=8), file, POOL)

    known: dict[int, list[int]] = {}
    for row, prompt in zip(rows, made, strict=True):
        content: Any = prompt.content
        assert len(content) == row["input_length"]
        for number, part in enumerate(row["hash_ids"]):
            seen = content[8 * number : 8 * number + 8]
            if len(seen) == 8:
                assert known.setdefault(part, seen) == seen
    assert len(known) == 4
    assert len({tuple(each) for each in known.values()}) == 4


def test_prompts_of_a_trace_are_cut_to_a_model(tmp_path: Path) -> None:
    (file := tmp_path / "trace.csv").write_text(
        "timestamp_s,input_tokens,output_tokens\n0,90,5\n1,3,4\n2,5,90\n"
    )

    made = timed_prompts(timed(file, timed_trace_max_len=20), file, POOL)

    assert [(each.prompt_tokens, each.answer_tokens) for each in made] == [(15, 5), (3, 4), (1, 19)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("timestamp_s,input_tokens,output_tokens\n", "must have requests"),
        ("timestamp_s,input_tokens,output_tokens\nx,1,1\n", "timestamp_s: must be a number"),
        ("timestamp_s,input_tokens,output_tokens\nnan,1,1\n", "timestamp_s: must be a number"),
        ("timestamp_s,input_tokens,output_tokens\n0,inf,1\n", "input_tokens: must be a number"),
        ("a,b\n1,2\n", "timestamp: must be a number|timestamp_s: must be a number"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (file := tmp_path / "trace.csv").write_text(text)

    with pytest.raises(InvalidInput, match=says):
        timed_prompts(timed(file), file, POOL)


@pytest.mark.parametrize(
    "line",
    ["[1]", "3", "{", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 4}'],
)
def test_a_line_that_is_no_arrival_is_refused(tmp_path: Path, line: str) -> None:
    (file := tmp_path / "trace.jsonl").write_text(line + "\n")

    with pytest.raises(InvalidInput):
        timed_prompts(timed(file), file, POOL)


def test_columns_can_be_named(tmp_path: Path) -> None:
    (file := tmp_path / "trace.csv").write_text("t,in,out\n1,2,3\n")

    [one] = timed_prompts(
        timed(
            file,
            timed_trace_label_timestamp="t",
            timed_trace_label_input_length="in",
            timed_trace_label_output_length="out",
        ),
        file,
        POOL,
    )

    assert (one.due_s, one.prompt_tokens, one.answer_tokens) == (0, 2, 3)
