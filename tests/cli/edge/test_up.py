"""``moesaic up --topology edge``, with child processes that stand in for the services."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.cli.machine.state import SuiteState

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]

EDGE = ("up", "--model", "model", "--port", "0", "--topology", "edge")


def test_an_edge_suite_has_agents(
    start: Start, suite: Callable[[str], SuiteState], house: Path
) -> None:
    flags = ("--agents", "2", "--memory", "40M,80M", "--max-num-seqs=7")
    process = start(*EDGE, *flags)
    ready = suite("ready")
    process.terminate()
    process.communicate()

    assert process.returncode == 0
    names = ["redis", "scheduler", "agent-0", "agent-1", "gateway"]
    assert [process.name for process in ready.processes] == names
    log = (house / "run" / "agent-1.log").read_text()
    assert "--memory-bytes 80000000" in log
    assert "--max-num-seqs=7" in log
    assert "service.stopping" in log


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["--attention", "2"], {}, "--attention: the edge topology"),
        (["--experts", "2"], {}, "--experts: the edge topology"),
        (["--slots-per-layer", "2"], {}, "--slots-per-layer: the edge"),
        (["--offload"], {}, "--offload: the edge topology"),
        ([], {"MOESAIC_EXPERTS": "2"}, "--experts: the edge topology"),
        (["--agents", "65"], {}, "--agents"),
        (["--link", "fast"], {}, "--link fast: must be a rate"),
        (["--memory-bytes=4"], {}, "--memory-bytes: give it as --memory"),
        (["--activation-window-s=0"], {}, "--activation-window-s (MOESAIC_ACTIVATION_WINDOW_S)"),
        (["--slots=2"], {}, "--slots: unknown flag"),
        (["--memory", "40"], {}, "--memory 40: it must be a number with"),
    ],
)
def test_what_is_wrong_at_the_start_is_named_before_anything_runs(
    ask: Run, house: Path, arguments: list[str], env: dict[str, str], says: str
) -> None:
    up = ask(*EDGE, *arguments, **env)

    assert up.returncode == 2
    # Usage errors come in a box whose lines break anywhere.
    assert says in up.stderr.replace("\n", " ")
    assert "Traceback" not in up.stderr
    assert not list(house.glob("run/*.log"))
