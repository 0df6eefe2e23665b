"""The page of the files and functions that five paths meet, made from a recorded run.

``make paths`` starts suites of the demo model with ``recorder/sitecustomize.py`` on their path, has each thing happen
once, and writes ``paths.json`` and ``paths.md``. ``python -m docs.inside.paths --page`` writes the page again from
``paths.json`` and the docstrings of today; nothing is started.

A function that a process also calls while nothing happens is on no path: heartbeats, leases and the loops round them.
Request and row are recorded several times, and a function is on the path if each of them meets it. So what happens by
the clock is on no path either.
"""

import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE, RECORD = HERE / "paths.md", HERE / "paths.json"
DEMO = ROOT / "models" / "demo"
# Longer than all intervals at which services do something unasked, but those of minutes.
IDLE_S = 12.0
POLL_S = 0.1
# Longest wait for anything, in seconds.
PATIENCE_S = 300.0
# Numbers of the windows in which nothing is asked, and in which plain chats are answered.
IDLE, CHATS = 1, 2
UNASKED = IDLE, CHATS
TIMES = 5
# Functions of a file that are named; of others there is only the number.
MOST_NAMED = 8
# A warm request may meet so many files; a slow test records one and counts.
MOST_OF_REQUEST = 84
# A table of more files than this is folded.
SHOWN_ROWS = 90
TOKENS = 16
# An answer that lasts for longer than ROW_S, in which there are many steps.
LONG_TOKENS, ROW_S = 1500, 0.3
PROMPTS = tuple(f"Continue the story: {name} went to the river." for name in ("Ana", "Omar", "Mei"))


@dataclass
class Met:
    """A file on a path.

    Attributes:
        file: its path.
        roles: the processes that meet it.
        count: number of its functions that are met.
        functions: names of the first of these, in order of first call.
    """

    file: str
    roles: list[str] = field(default_factory=list)
    count: int = 0
    functions: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Told:
    """The words about a path."""

    title: str
    text: str


PATHS: Mapping[str, Told] = {
    "request": Told(
        "A request",
        "A warm streamed chat completion in topology `local`: gateway and attention worker. A helper process "
        "renders the chat template; it is not counted.",
    ),
    "row": Told(
        "A row",
        "Steps of one answer in topology `disaggregated`, in its middle: attention worker and expert workers. Where "
        "[C](data-plane.md) carries rows and computes experts, no Python is met.",
    ),
    "epoch": Told(
        "An epoch",
        "A placement with experts elsewhere: planned from traffic, prepared by workers, committed, and used by a "
        "request: scheduler, its solver, expert workers, attention worker.",
    ),
    "threshold": Told(
        "A brownout threshold",
        "An operator sets a threshold of one half; a request is computed with it: scheduler, attention worker, expert "
        "workers.",
    ),
    "scale-up": Told(
        "A scale-up",
        "An attention worker and an expert worker leave standby, and a request follows: scheduler, workers, gateway.",
    ),
}


# A file that a path meets in any case.
LANDMARKS = {
    "request": "services/gateway/entry.py",
    "row": "libs/moesaic/engine/engine.py",
    "epoch": "libs/moesaic/experts/epochs.py",
    "threshold": "libs/moesaic/engine/brownout.py",
    "scale-up": "services/scheduler/scaling/controller.py",
}


class Recorder:
    """Opens windows of recording, which all processes of a suite see at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._window = (directory / "window").open("wb", buffering=0)
        self._window.write(b"\0")
        self._numbers = count(IDLE)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a Python process records."""
        path = (HERE / "recorder", ROOT / "libs", ROOT)
        return {"PATHS_OF": str(self._directory), "PYTHONPATH": ":".join(map(str, path))}

    @contextmanager
    def window(self) -> Iterator[int]:
        """Record all calls within the block, under a new number; the first one must be ``IDLE``."""
        number = next(self._numbers)
        os.pwrite(self._window.fileno(), bytes([number]), 0)
        try:
            yield number
        finally:
            os.pwrite(self._window.fileno(), b"\0", 0)

    def met(
        self, numbers: Sequence[int], roles: Sequence[str], without: Sequence[int] = (IDLE,)
    ) -> list[Met]:
        """List the files that processes of these roles met, by first call.

        Args:
            numbers: windows; a function is on the path if it is met in each.
            roles: of processes.
            without: windows; a function that the same process calls in one of these is not on the path.
        """
        first_ns: dict[tuple[str, str, str], dict[int, int]] = {}
        for file in self._directory.glob("*.calls"):
            command, *lines = file.read_text(encoding="utf-8").splitlines()
            role = _role(json.loads(command))
            if role not in roles:
                continue
            told = [line.split("\t") for line in lines if line.count("\t") == 3]
            usual = {(path, name) for window, _, path, name in told if int(window) in without}
            for window, at_ns, path, name in told:
                if int(window) in numbers and (path, name) not in usual:
                    first_ns.setdefault((path, name, role), {}).setdefault(int(window), int(at_ns))
        found: dict[str, Met] = {}
        names: dict[str, set[str]] = {}
        for path, name, role in sorted(first_ns, key=lambda key: min(first_ns[key].values())):
            # Nameless functions, bodies of modules, and stubs say nothing.
            unnamed = "<" in name.rpartition(".")[2] or "/v1/" in path
            if unnamed or len(first_ns[path, name, role]) < len(numbers):
                continue
            met = found.setdefault(path, Met(path))
            if role not in met.roles:
                met.roles.append(role)
            if name not in names.setdefault(path, set()):
                names[path].add(name)
                met.count += 1
                if met.count <= MOST_NAMED:
                    met.functions.append(name)
        return list(found.values())


def _role(command: Sequence[str]) -> str:
    """Name the role of a process by its command: the first part of the service's module."""
    modules = [word for word in command if word.startswith("moesaic.")] or ["other"]
    return modules[0].removeprefix("moesaic.services.").split(".")[0]


class Suite:
    """A running suite that records."""

    def __init__(self, directory: Path, recorder: Recorder) -> None:
        self._directory, self.recorder = directory, recorder
        self.url = str(json.loads((directory / "run/moesaic.json").read_text("utf-8"))["url"])

    def cli(self, *arguments: str) -> str:
        """Run a command against this suite; give what it prints."""
        return _cli(self._directory, {}, *arguments)

    def chat(self, prompt: str = PROMPTS[0]) -> None:
        """Have one chat answered, streamed."""
        with self.streamed(prompt, TOKENS) as lines:
            for _ in lines:
                pass

    @contextmanager
    def streamed(self, prompt: str, max_tokens: int) -> Iterator[Iterator[str]]:
        """Begin an answer of exactly ``max_tokens``; give the lines of its stream."""
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
            answer.raise_for_status()
            yield answer.iter_lines()

    def settle(self) -> None:
        """Answer each prompt twice, so that all is warm, then record what happens unasked, and in plain chats."""
        for _ in range(2):
            for prompt in PROMPTS:
                self.chat(prompt)
        with self.recorder.window():
            time.sleep(IDLE_S)
        with self.recorder.window():
            for prompt in PROMPTS:
                self.chat(prompt)


@contextmanager
def suite(*flags: str, **settings: str) -> Iterator[Suite]:
    """A warm suite of the demo model, stopped at the end."""
    with TemporaryDirectory() as directory:
        recorder = Recorder(Path(directory))
        run = Path(directory, "suite")
        run.mkdir()
        up = ("up", "--detach", "--json", "--model", str(DEMO), "--port", "0", *flags)
        _cli(run, {**recorder.environment, **settings}, *up)
        try:
            started = Suite(run, recorder)
            started.settle()
            yield started
        finally:
            _cli(run, {}, "down")


def _cli(directory: Path, variables: Mapping[str, str], *arguments: str) -> str:
    path = {"PYTHONPATH": f"{ROOT / 'libs'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "moesaic.cli", *arguments],
        cwd=directory,
        env={**os.environ, **path, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"moesaic {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(POLL_S)


def record_request() -> list[Met]:
    """Record warm streamed chats over the gateway and one attention worker."""
    numbers = []
    with suite("--topology", "local") as local:
        for _ in range(TIMES):
            with local.recorder.window() as number:
                local.chat()
            numbers.append(number)
        return local.recorder.met(numbers, ("gateway", "attention"))


def record_control() -> dict[str, list[Met]]:
    """Record a row, an epoch and a threshold, one after the other in one suite."""
    # Some experts have replicas and most have none, so that a plan moves experts.
    flags = ("--experts", "3", "--slots-per-layer", "14")
    quick = {
        "MOESAIC_ACTIVATION_WINDOW_S": "0.5",
        "MOESAIC_MIN_EPOCH_INTERVAL_S": "0",
        "MOESAIC_REPLAN_INTERVAL_S": "3600",
    }
    found = {}
    with suite(*flags, **quick) as spread, TemporaryDirectory() as directory:
        recorder = spread.recorder
        numbers = [_row(spread) for _ in range(TIMES)]
        found["row"] = recorder.met(numbers, ("attention", "expert"))

        plan = str(Path(directory, "plan.json"))
        with recorder.window() as number:
            _until(lambda: _is_planned(spread, plan))
            spread.cli("placement", "apply", plan)
            spread.chat()
        found["epoch"] = recorder.met([number], ("scheduler", "expert", "attention"), UNASKED)

        flags = ("--prefill-threshold", "0.5", "--decode-threshold", "0.5")
        with recorder.window() as number:
            spread.cli("brownout", "set", "--mode", "manual", *flags)
            _until(lambda: _thresholds(spread) == {0.5})
            spread.chat()
        found["threshold"] = recorder.met([number], ("scheduler", "attention", "expert"), UNASKED)
    return found


def _row(spread: Suite) -> int:
    """Record some steps in the middle of a long answer; give the number of the window."""
    with spread.streamed(PROMPTS[0], LONG_TOKENS) as lines:
        next(lines)
        with spread.recorder.window() as number:
            time.sleep(ROW_S)
    return number


def _is_planned(spread: Suite, file: str) -> bool:
    """Plan by recent traffic, of which there is some more before each attempt."""
    spread.chat()
    with suppress(RuntimeError):
        return bool(json.loads(spread.cli("placement", "plan", "--json", "--out", file))["moves"])
    return False


def _thresholds(spread: Suite) -> set[float]:
    workers = json.loads(spread.cli("brownout", "show", "--json"))["workers"]
    return {float(worker["decode_threshold"]) for worker in workers}


def record_scale_up() -> list[Met]:
    """Record that workers on standby become active."""
    flags = ("--standby-attention", "1", "--standby-experts", "1", "--slots-per-layer", "32")
    with suite(*flags, MOESAIC_MIN_EPOCH_INTERVAL_S="0", MOESAIC_SETTLE_S="0.2") as standby:
        with standby.recorder.window() as number:
            standby.cli("scale", "to", "2A3E")
            standby.chat()
        roles = ("scheduler", "attention", "expert", "gateway")
        return standby.recorder.met([number], roles, UNASKED)


def page_of(paths: Mapping[str, Sequence[Met]]) -> str:
    """Write the page of a record."""
    lines = [
        "# Paths",
        "",
        *_wrapped(
            "Made by `make paths` from a recorded run; do not edit. It lists the files and functions that five paths "
            "meet in Python, in order of first call. Functions that the same process also calls while nothing happens "
            "are left out: heartbeats, leases, and the loops round them. The last three paths leave out the functions "
            "that any chat meets, too. The text beside a file is the first sentence of its docstring. "
            "[`paths.json`](paths.json) has the names of the functions."
        ),
        "",
        "| path | files | functions |",
        "|---|---:|---:|",
    ]
    for name, met in paths.items():
        title = PATHS[name].title
        anchor = title.lower().replace(" ", "-")
        lines.append(f"| [{title}](#{anchor}) | {len(met)} | {num_functions(met)} |")
    lines += ["", *WHY.splitlines()]
    for name, met in paths.items():
        told = PATHS[name]
        counted = f"{len(met)} files, {num_functions(met)} functions."
        lines += ["", f"## {told.title}", "", *_wrapped(told.text), "", counted, ""]
        lines += _folded("Files", _table(met)) if len(met) > SHOWN_ROWS else _table(met)
    return "\n".join(lines) + "\n"


WHY = """\
The aim for a request was 60 files in both processes; before files were merged it met 111. Three things keep the number
up. A server of many tenants checks each request: head, body, caller, limits, room and time. The engine shares each
step among tenants, and keeps account of it for brownout and scaling. And the library is in layers, so that tokens,
prefix blocks and kernels can be read and tested without the services. Files were merged where they answer one
question. Files of a thousand lines would shorten the list, and would not be easier to read."""


def num_functions(met: Sequence[Met]) -> int:
    """Count the functions of a path."""
    return sum(each.count for each in met)


def _table(met: Sequence[Met]) -> list[str]:
    lines = ["| file | process | what happens there | functions |", "|---|---|---|---:|"]
    for each in met:
        link = f"[`{each.file}`](../../{each.file})"
        lines.append(
            f"| {link} | {', '.join(each.roles)} | {_sentence(ROOT / each.file)} | {each.count} |"
        )
    return lines


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return ["<details markdown>", f"<summary>{title}</summary>", "", *lines, "", "</details>"]


def _sentence(file: Path) -> str:
    """Give the first sentence of a module's docstring, as Markdown in a table."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = re.split(r"\.(?=\s|$)", docstring.split("\n\n")[0], maxsplit=1)[0]
    return " ".join(first.split()).replace("``", "`").replace("|", "\\|")


def _wrapped(text: str, width: int = 120) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return lines


def read_record() -> dict[str, list[Met]]:
    """Read the committed record."""
    told: dict[str, list[dict[str, Any]]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: [Met(**each) for each in met] for name, met in told.items()}


def check(paths: Mapping[str, Sequence[Met]]) -> None:
    """Make sure that each path has met the part that it is about.

    Raises:
        RuntimeError: one has not, such as a row whose answer was over before.
    """
    for name, file in LANDMARKS.items():
        if file not in {each.file for each in paths[name]}:
            raise RuntimeError(f"{name}: {file} was not met, record again")


def main() -> None:
    """Record, unless only the page is asked for, and write the page."""
    if sys.argv[1:] != ["--page"]:
        found = {"request": record_request(), **record_control(), "scale-up": record_scale_up()}
        check(found)
        told = {name: [asdict(each) for each in found[name]] for name in PATHS}
        lines = (
            f'"{name}": [\n' + ",\n".join(map(json.dumps, met)) + "\n]"
            for name, met in told.items()
        )
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    PAGE.write_text(page_of(read_record()), encoding="utf-8")


if __name__ == "__main__":
    main()
