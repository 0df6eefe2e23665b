"""The page of paths: true to its record, to the code of today, and to a run."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest

from docs.inside.paths import (
    MOST_OF_REQUEST,
    PAGE,
    PATHS,
    ROOT,
    Recorder,
    page_of,
    read_record,
    record_request,
)

# Calls one function in each round, when it is told to go on.
SCRIPT = """
from moesaic.addresses import host_port, is_address
for call in ("is_address('::1')", "is_address('::1') and host_port('::1', 80)"):
    print(flush=True)
    input()
    eval(call)
print(flush=True)
input()
"""


def qualified_names(file: Path) -> Iterator[str]:
    """Names of all functions of a file, as ``co_qualname`` has them less ``<locals>``."""

    def within(code: CodeType) -> Iterator[str]:
        for each in code.co_consts:
            if isinstance(each, CodeType):
                yield each.co_qualname.replace(".<locals>", "")
                yield from within(each)

    # From where imports keep it, if it is there.
    code = SourceFileLoader(file.stem, str(file)).get_code(file.stem)
    assert code is not None
    yield from within(code)


def test_the_page_is_made_from_the_record_and_todays_docstrings() -> None:
    record = read_record()
    assert list(record) == list(PATHS)
    assert PAGE.read_text(encoding="utf-8") == page_of(record), "run make reference"


def test_all_functions_of_the_record_are_in_their_files() -> None:
    recorded: dict[str, set[str]] = {}
    for met in read_record().values():
        for each in met:
            recorded.setdefault(each.file, set()).update(each.functions)
    gone = {
        file: left
        for file, names in recorded.items()
        if (left := names - set(qualified_names(ROOT / file)))
    }
    assert gone == {}, "run make paths"


def test_a_recorder_leaves_out_what_idle_processes_call_too(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    command = [sys.executable, "-c", SCRIPT, "moesaic.services.gateway"]
    with subprocess.Popen(
        command,
        env=recorder.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def go_on() -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()

        process.stdout.readline()
        with recorder.window():
            go_on()
        with recorder.window() as number:
            go_on()
        process.stdin.write("\n")

    [met] = recorder.met([number], ["gateway"])
    assert (met.file, met.roles) == ("libs/moesaic/addresses.py", ["gateway"])
    assert "host_port" in met.functions
    assert "is_address" not in met.functions
    assert recorder.met([number], ["attention"]) == []


@pytest.mark.slow
@pytest.mark.suite
def test_a_warm_chat_meets_no_more_files_than_it_may() -> None:
    met = record_request()

    files = [each.file for each in met]
    assert {"services/gateway/entry.py", "libs/moesaic/engine/engine.py"} <= set(files)
    assert len(files) <= MOST_OF_REQUEST
