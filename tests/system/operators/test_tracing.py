"""Recording which experts a suite's traffic chooses."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.placement.traffic.trace import Trace
from tests.suites import MOESAIC, ROOT, Suite
from tests.waiting import eventually

DEMO_TRACE = ROOT / "benchmarks/data/demo.moetrace"


def recorded(suite: Suite, file: Path, *flags: str, interrupt: bool = False) -> Trace:
    """Record while answers are generated: thirty rows, or those until Ctrl-C."""
    flags += () if interrupt else ("--max-rows", "30")
    command = [str(MOESAIC), "trace", "record", str(file), "--seconds", "600", *flags]
    with subprocess.Popen(
        command, cwd=suite.directory, stderr=subprocess.PIPE, text=True
    ) as recorder:
        assert recorder.stderr is not None
        assert recorder.stderr.readline().startswith("recording attention-0")  # it watches
        asked = 0
        while recorder.poll() is None:
            answer = suite.cli("generate", "Once upon a time", "--max-tokens", "20")
            assert answer.returncode == 0, answer.stderr
            asked += 1
            if interrupt and asked == 3:
                recorder.send_signal(signal.SIGINT)
                recorder.wait()
        assert recorder.returncode == 0, recorder.stderr.read()
    return Trace.decode(file.read_bytes())


def test_a_suite_is_recorded_part_by_part_and_replayed(
    disaggregated: Suite, tmp_path: Path
) -> None:
    file = tmp_path / "suite.moetrace"

    first = recorded(disaggregated, file, "--part", "one")
    both = recorded(disaggregated, file, "--part", "two", "--append", interrupt=True)

    assert (first.num_experts, first.top_k, first.layers) == (32, 4, tuple(range(8)))
    assert first.num_rows >= 30
    assert both.parts == ("one", "two")
    assert len(both.selected(["one"])) == len(first.steps) < len(both.steps)
    shown = disaggregated.cli("simulate", "trace", str(file), "--instances", "2", "--json")
    assert shown.returncode == 0, shown.stderr
    facts = json.loads(shown.stdout)
    assert sum(part["rows"] for part in facts["parts"]) == both.num_rows
    assert facts["placed_on"] == {"instances": 2, "slots": 20}


@pytest.mark.slow
def test_a_recording_that_cannot_be_kept_is_refused_before_it_takes_its_time(
    disaggregated: Suite, tmp_path: Path
) -> None:
    def refused(file: Path, *flags: str) -> str:
        recorder = disaggregated.cli("trace", "record", str(file), "--seconds", "600", *flags)
        assert recorder.returncode in (1, 2)
        assert not list(tmp_path.rglob("*.new"))
        return recorder.stderr

    foreign, before = tmp_path / "foreign.moetrace", DEMO_TRACE.read_bytes()
    foreign.write_bytes(replace(Trace.decode(before), model_digest="another").encode())
    other = foreign.read_bytes()

    assert "No such file or directory" in refused(tmp_path / "nowhere" / "x.moetrace")
    assert "Is a directory" in refused(tmp_path)
    assert "holds a trace of another model" in refused(foreign, "--append")
    assert foreign.read_bytes() == other


def test_who_records_second_is_told_so(disaggregated: Suite, tmp_path: Path) -> None:
    def recorder(name: str) -> "subprocess.Popen[str]":
        command = [str(MOESAIC), "trace", "record", str(tmp_path / name), "--seconds", "600"]
        return subprocess.Popen(
            command, cwd=disaggregated.directory, stderr=subprocess.PIPE, text=True
        )

    with recorder("x") as one, recorder("y") as other:
        eventually(lambda: one.poll() is not None or other.poll() is not None)
        refused, first = (one, other) if other.poll() is None else (other, one)
        first.send_signal(signal.SIGINT)
        problems = [recording.communicate()[1] for recording in (refused, first)]

    assert (refused.returncode, first.returncode) == (1, 3)
    assert "a trace of this attention worker is being recorded already" in problems[0]
    assert "no request was running" in problems[1]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_recorded_or_read_is_said(tmp_path: Path) -> None:
    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "moesaic.cli", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    (tmp_path / "text").write_text("no trace")

    nowhere, damaged, absent = (
        run("trace", "record", "x"),
        run("simulate", "trace", "text"),
        run("simulate", "trace", "absent"),
    )
    few = run("simulate", "trace", str(DEMO_TRACE), "--instances", "2", "--slots", "3")

    assert (nowhere.returncode, damaged.returncode, absent.returncode) == (3, 2, 2)
    assert "nothing runs in this directory" in nowhere.stderr
    assert "is not a routing trace" in damaged.stderr
    assert few.returncode == 2
    assert "--slots 3: 2 instances have 6 slots a layer, the trace is of 32 experts" in few.stderr
