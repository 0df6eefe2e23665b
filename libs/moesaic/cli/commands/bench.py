"""``moesaic bench``: measurements behind the project's claims."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from moesaic.cli.commands.bench_serve import SeveralValues, bench_serve
from moesaic.cli.terminal.console import print_table, say
from moesaic.cli.terminal.outcome import CommandError, Exit, using

FOLDER = Path("benchmarks")  # of the project's sources


def _names() -> list[str]:
    """List the benchmarks of this directory: modules with ``run``, or folders with such a ``bench``."""
    modules = [*FOLDER.glob("*.py"), *(path.parent for path in FOLDER.glob("*/bench.py"))]
    runs = [each for each in modules if each.is_dir() or "\ndef run(" in each.read_text()]
    return sorted({each.stem.replace("_", "-") for each in runs})


class Benchmarks(TyperGroup):
    """The load generator, which is installed, and the benchmarks of this directory's sources."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List all names, for help and completion."""
        return [*super().list_commands(ctx), *_names()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Find a command; any other name is a benchmark's, which says so if there is none."""
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        sources = typer.Typer(add_completion=False)
        sources.command(cmd_name)(bench)
        return typer.main.get_command(sources)


def bench(
    context: typer.Context,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Use less data; takes from half a minute to some minutes."),
    ] = False,
    json_to: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE|-", help="Write the result as JSON; - prints it last."
        ),
    ] = None,
) -> None:
    """Run one benchmark of the project's sources and print its figures."""
    import json

    from moesaic.cli.machine.facts import commit, gemm_gflops, kernel_digests, machine_facts

    name = context.command.name or ""
    # An installed command's path lacks where it is run.
    sys.path.insert(0, str(Path.cwd()))
    if find_spec("benchmarks") is None:
        raise CommandError("benchmarks need the sources: run this in the project's directory")
    try:
        module = _benchmark(f"benchmarks.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("benchmarks."):
            known = ", ".join(_names())
            raise CommandError(f"{name}: give one of {known}", Exit.USAGE) from error
        install = (
            "pip install -c constraints.txt -e '.[dev]' -e libs/moesaic_lab (make test does that)"
        )
        raise CommandError(f"{name} needs the package {error.name}: {install}") from error
    if json_to not in (None, "-") and not Path(str(json_to)).parent.is_dir():
        raise CommandError(f"--json {json_to}: no such directory", Exit.USAGE)
    say(f"{name}: measuring{', quick' if quick else ''}")
    before, machine = gemm_gflops(), machine_facts()
    facts = {
        "name": name,
        "commit": commit(),
        "machine": {**machine, "gemm_gflops_before": before},
        **({"kernels": kernel_digests()} if machine["gpu"] else {}),
    }
    with _ending_at_sigterm():
        for measured in _states(module, quick):
            result: dict[str, Any] = {**facts, **_told(measured)}
            if json_to not in (None, "-"):
                _write(str(json_to), {**result, "unfinished": True})
    result["machine"]["gemm_gflops_after"] = gemm_gflops()
    print_table(("figure", "value"), flattened(result["figures"]), title=name)
    for note in result["notes"]:
        print(f"note: {note}")
    if json_to == "-":
        print(json.dumps(result, ensure_ascii=False))
    elif json_to:
        _write(json_to, result)
    if measured.get("failed"):
        raise CommandError(f"{name}: {measured['failed']}")


def _states(module: ModuleType, quick: bool) -> Iterator[dict[str, Any]]:
    """Yield what a benchmark has measured so far, each time that it tells; most tell once, at their end."""
    measured = module.run(quick)
    if isinstance(measured, dict):
        yield measured
    else:
        yield from measured


def _told(measured: dict[str, Any]) -> dict[str, Any]:
    return {
        "config": measured["config"],
        "figures": measured["figures"],
        **({"series": measured["series"]} if "series" in measured else {}),
        "paper": measured.get("paper", {}),
        "notes": list(measured["notes"]),
    }


def _write(to: str, result: dict[str, Any]) -> None:
    import json

    with using(f"--json {to}"):
        Path(to).write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def _ending_at_sigterm() -> Iterator[None]:
    """End at SIGTERM as at Ctrl-C, so that what a benchmark has started ends with it."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _benchmark(name: str) -> ModuleType:
    """Import the module with ``run``: the benchmark itself, or ``bench`` of its folder."""
    module = import_module(name)
    found = import_module(f"{name}.bench") if hasattr(module, "__path__") else module
    if not hasattr(found, "run"):
        raise ModuleNotFoundError(name=name)
    return found


def flattened(figures: dict[str, Any], name: str = "") -> list[tuple[str, str]]:
    """Flatten nested figures into rows of (dotted name, values); what stands side by side shares a row."""
    values = {key: _text(value) for key, value in figures.items() if not isinstance(value, dict)}
    rows = [*values.items()]
    if name and values:
        rows = [(name, ", ".join(f"{key} {value}" for key, value in values.items()))]
    for key, value in figures.items():
        if isinstance(value, dict):
            rows += flattened(value, f"{name}.{key}" if name else key)
    return rows


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


app = typer.Typer(
    cls=Benchmarks,
    no_args_is_help=True,
    help="Measure a server under load (serve), or run a benchmark of the project's sources; "
    "docs/use/command-line.md describes each.",
)
app.command("serve", cls=SeveralValues)(bench_serve)
