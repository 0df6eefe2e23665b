from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.batch.journal import Journal
from moesaic.batch.requests import BadLine, BatchRequest, Line
from moesaic.batch.results import RouteAnswer, answered, refused, unanswered

LINES: list[Line] = [
    BatchRequest(1, "a", "/v1/classify", b"{}"),
    BadLine(2, None, "invalid_json_line", "not JSON"),
    BatchRequest(3, "c", "/v1/classify", b"{}"),
    BatchRequest(4, "d", "/v1/classify", b"{}"),
]
RESULTS = [
    answered("a", RouteAnswer(200, "r", {"usage": {"prompt_tokens": 3}})),
    refused(LINES[1]),  # type: ignore[arg-type]
    unanswered("c", "unreachable", "gone"),
    answered("d", RouteAnswer(200, "r", {})),
]
WHOLE = b"".join(result.encode() for result in RESULTS)
ENDS = [sum(len(r.encode()) for r in RESULTS[:n]) for n in range(len(RESULTS) + 1)]


@given(length=st.integers(0, len(WHOLE)), junk=st.binary(max_size=20))
def test_whatever_a_crash_leaves_the_output_becomes_the_same(
    tmp_path_factory: pytest.TempPathFactory, length: int, junk: bytes
) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "crash.jsonl"
    path.write_bytes(WHOLE[:length] + junk)

    with Journal(path) as journal:
        rest = list(journal.resume(iter(LINES)))
        done = len(LINES) - len(rest)
        assert ENDS[done] <= length < [*ENDS, length + 1][done + 1]
        assert journal.tally.total == done
        journal.write(RESULTS[done:])

        assert (journal.tally.completed, journal.tally.failed) == (2, 2)
        assert journal.tally.prompt_tokens == 3
        assert journal.num_bytes == len(WHOLE)
    assert path.read_bytes() == WHOLE


def test_results_of_another_input_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(WHOLE)
    other: list[Line] = [LINES[0], BatchRequest(2, "other", "/v1/classify", b"{}"), *LINES[2:]]

    with Journal(path) as journal:
        rest = list(journal.resume(iter(other)))

    assert rest == other[1:]
    assert path.read_bytes() == RESULTS[0].encode()


def test_more_results_than_lines_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(WHOLE)

    with Journal(path) as journal:
        assert list(journal.resume(iter(LINES[:2]))) == []
        journal.sync()

    assert path.read_bytes() == WHOLE[: ENDS[2]]
