import gzip
import json
from pathlib import Path

import pytest

from moesaic.errors import InvalidInput
from moesaic_lab.simulation.trace_files import read_arrivals, read_rates


def test_arrivals_are_read_from_csv_with_and_without_clients(tmp_path: Path) -> None:
    (tmp_path / "plain.csv").write_text(
        "timestamp_s,input_tokens,output_tokens\n0.5,10,3\n1.5,20,4\n"
    )
    with gzip.open(tmp_path / "packed.csv.gz", "wt") as file:
        file.write("timestamp_s,input_tokens,output_tokens,client\n0.5,10,3,c1\n1.5,20,4,c2\n")

    for name in ("plain.csv", "packed.csv.gz"):
        trace = read_arrivals(tmp_path / name)
        assert trace.at_s.tolist() == [0.5, 1.5]
        assert trace.prompt_tokens.tolist() == [10, 20]
        assert trace.answer_tokens.tolist() == [3, 4]
        assert trace.cached_tokens.tolist() == [0, 0]


def test_blocks_named_before_count_as_cached(tmp_path: Path) -> None:
    rows = [
        {"timestamp_s": 0.0, "input_tokens": 1100, "output_tokens": 1, "hash_ids": [1, 2, 3]},
        {"timestamp_s": 1.0, "input_tokens": 1300, "output_tokens": 1, "hash_ids": [1, 2, 4]},
        {"timestamp_s": 2.0, "input_tokens": 1024, "output_tokens": 1, "hash_ids": [1, 2]},
    ]
    file = tmp_path / "trace.jsonl.gz"
    with gzip.open(file, "wt") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in rows)

    trace = read_arrivals(file)

    assert trace.cached_tokens.tolist() == [0, 1024, 1023]  # the last token always has to run


def test_rates_are_read_of_one_model(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    file.write_text(
        "model,window_start_s,requests_per_s,active_clients\na,0,5.5,1\na,600,7,1\nb,0,1,1\nb,600,2,1\n"
    )

    curve = read_rates(file, "a")

    assert (curve.per_s.tolist(), curve.window_s) == ([5.5, 7.0], 600.0)
    with pytest.raises(InvalidInput, match="one of a, b"):
        read_rates(file, "c")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("timestamp_s,input_tokens\n0,1\n", "output_tokens"),
        ("timestamp_s,input_tokens,output_tokens\n0,many,1\n", "input_tokens"),
        ("timestamp_s,input_tokens,output_tokens\n", "trace"),
        ("timestamp_s,input_tokens,output_tokens\n1,1,1\n0,1,1\n", "at_s"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "trace.csv").write_text(text)

    with pytest.raises(InvalidInput, match=field):
        read_arrivals(tmp_path / "trace.csv")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_arrivals(tmp_path / "none.csv")
