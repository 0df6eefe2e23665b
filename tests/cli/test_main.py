import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moesaic.cli.commands.bench import flattened
from moesaic.cli.commands.status import experts_text, ranges
from moesaic.cli.main import app
from moesaic.cli.suite.log_tail import LogTail, warning_text

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_command_starts_without_heavy_packages() -> None:
    code = "import sys, moesaic.cli.main; print(*sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout

    heavy = {"torch", "ucxx", "grpc", "httpx", "redis", "numpy", "pydantic", "asyncio"}
    assert not heavy & set(loaded.split())


@pytest.mark.parametrize(
    "command", ["up", "down", "status", "classify", "generate", "chat", "bench", "api-key", "serve"]
)
def test_every_command_explains_itself(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])

    assert done.exit_code == 0
    assert "Usage" in done.stdout


def test_the_version_is_shown(ask: Run) -> None:
    done = ask("--version")

    assert (done.returncode, done.stdout) == (0, f"moesaic {version('moesaic')}\n")


def test_an_unknown_command_is_wrong_use(ask: Run) -> None:
    assert ask("fly").returncode == 2


def test_status_without_a_suite_says_how_to_start_one(ask: Run) -> None:
    done = ask("status")

    assert done.returncode == 3
    assert "start a suite with 'moesaic up'" in done.stderr


def test_a_scheduler_that_was_named_and_does_not_answer_is_shown(ask: Run) -> None:
    done = ask("status", "--scheduler", "127.0.0.1:1", "--url", "http://127.0.0.1:1", "--json")

    assert done.returncode == 3
    (scheduler,) = json.loads(done.stdout)["services"]
    assert (scheduler["role"], scheduler["admin_address"]) == ("scheduler", "127.0.0.1:1")
    assert scheduler["state"] == "unreachable"


def test_down_without_a_suite_is_fine(ask: Run) -> None:
    done = ask("down")

    assert (done.returncode, done.stdout) == (0, "nothing runs in this directory\n")


def test_serve_hands_its_flags_to_the_service(ask: Run) -> None:
    done = ask("serve", "expert", "--slots-per-layr", "4", "--help")
    assert (done.returncode, done.stdout.count("Usage: moesaic serve expert")) == (0, 1)

    done = ask("serve", "expert", "--slots-per-layr", "4")
    assert done.returncode == 2
    assert done.stderr == (
        "--slots-per-layr: unknown flag, did you mean --slots-per-layer? "
        "('moesaic serve expert --help' lists them)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "status"), [(["status"], 2), (["status", "--help"], 0), (["down"], 2)]
)
def test_a_misspelt_variable_stops_every_command_but_help(
    ask: Run, arguments: list[str], status: int
) -> None:
    done = ask(*arguments, MOESAIC_URLL="http://127.0.0.1:1")

    assert done.returncode == status
    assert ("did you mean MOESAIC_URL?" in done.stderr) == (status == 2)


def test_a_benchmark_says_what_to_install(run: Run, house: Path) -> None:
    (house / "benchmarks").mkdir()
    (house / "benchmarks" / "__init__.py").touch()
    (house / "benchmarks" / "parity.py").write_text("import no_such_package\n")

    done = run("bench", "parity")

    assert done.returncode == 1
    assert "parity needs the package no_such_package: pip install" in done.stderr
    assert "'.[dev]'" in done.stderr


@pytest.mark.parametrize("name", ["hops", "parts", "hop.x"])
def test_an_unknown_benchmark_is_refused_with_those_that_there_are(
    run: Run, house: Path, name: str
) -> None:
    (house / "benchmarks").mkdir()
    (house / "benchmarks" / "__init__.py").touch()
    (house / "benchmarks" / "hop.py").write_text("\n\ndef run(quick):\n    return {}\n")
    (house / "benchmarks" / "parts.py").write_text("PARTS = 2\n")

    done = run("bench", name)

    assert (done.returncode, done.stderr) == (2, f"moesaic: {name}: give one of hop\n")


def test_the_last_line_of_a_benchmark_is_its_result(run: Run, house: Path) -> None:
    (house / "benchmarks").mkdir()
    (house / "benchmarks" / "__init__.py").touch()
    (house / "benchmarks" / "hop.py").write_text(
        "def run(quick):\n"
        "    print('working')\n"
        "    return {'config': {'quick': quick}, 'figures': {'a': {'b': 1.5}}, 'notes': ['less']}\n"
    )

    done = run("bench", "hop", "--quick", "--json", "-")

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == {"name", "commit", "machine", "config", "figures", "paper", "notes"}
    assert result["figures"] == {"a": {"b": 1.5}}
    assert result["machine"]["gemm_gflops_before"] > 0
    assert "b 1.5" in done.stdout


def test_figures_that_stand_side_by_side_share_a_row() -> None:
    assert flattened({"a": {"b": 0.123456789, "c": {"e": 3, "f": [1]}}, "d": "x"}) == [
        ("d", "x"),
        ("a", "b 0.123457"),
        ("a.c", "e 3, f [1]"),
    ]


def test_doctor_names_what_must_be_fixed(ask: Run, house: Path) -> None:
    (house / "model" / "tokenizer.json").unlink()

    done = ask("doctor", "--json", "--model", "model", MOESAIC_QUANTISATION="int8")

    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 3
    assert findings["model"]["status"] == "fail"
    assert "tokenizer.json" in findings["model"]["detail"]
    assert findings["model"]["fix"]
    assert "did you mean MOESAIC_QUANTIZATION?" in findings["variables"]["detail"]
    for name in ("python", "packages", "torch", "ucx", "redis", "memlock"):
        assert findings[name]["status"] == "ok", findings[name]


def test_numbers_are_shown_as_ranges() -> None:
    assert ranges([0, 1, 2, 3, 7, 9, 10]) == "0-3, 7, 9-10"


def test_the_experts_of_a_worker_are_shown_in_short() -> None:
    assert experts_text([[0, 1, 2], [0, 1, 2]]) == "0-2 in every layer"
    assert experts_text([[0, 1], [3]]) == "1 to 2 a layer, different ones"
    assert experts_text([[0, 1], [1, 2]]) == "2 a layer, different ones"
    assert experts_text([[], []]) == "none"


def test_only_warnings_and_errors_are_for_the_terminal() -> None:
    warning = '{"ts": "x", "level": "warning", "event": "redis.lost", "service": "s", "try": 2}'

    assert warning_text(warning) == ("redis.lost", "warning redis.lost try=2")
    assert warning_text('{"level": "info", "event": "replica.loaded"}') is None
    assert warning_text("Traceback (most recent call last):") is None
    assert warning_text("[1, 2]") is None


def test_a_log_is_read_line_by_line_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    tail = LogTail(path)
    assert tail.new_lines() == []

    path.write_text("one\ntw")
    first = tail.new_lines()
    with path.open("a") as log:
        log.write("o\n")

    assert first == ["one"]
    assert tail.new_lines() == ["two"]
