"""``moesaic trace``: records which experts a suite's traffic chooses."""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.terminal.console import say
from moesaic.cli.terminal.options import SchedulerOption
from moesaic.cli.terminal.outcome import CommandError, Exit, correcting, using

if TYPE_CHECKING:
    from moesaic.cli.clients.traces import Recording
    from moesaic.placement.traffic.trace import Trace

app = typer.Typer(no_args_is_help=True, help="Record which experts traffic chooses (ids, no text).")


@app.command()
def record(
    file: Annotated[Path, typer.Argument(help="File to write the trace to.")],
    seconds: Annotated[
        float,
        typer.Option(min=0.1, help="Length of the recording in seconds; Ctrl-C ends it early."),
    ] = 60,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Stop after about this number of rows.")
    ] = 1_000_000,
    part: Annotated[str, typer.Option(help="Name for this recording.")] = "traffic",
    append: Annotated[
        bool, typer.Option("--append", help="Add to FILE instead of replacing it.")
    ] = False,
    scheduler: SchedulerOption = "",
) -> None:
    """Record the routing of requests by the attention workers of a running suite."""
    import asyncio

    from moesaic.cli.clients.traces import Recording
    from moesaic.errors import MoesaicError

    before = _read(file) if append and file.exists() else None
    _require_writable(file)
    recording, problem = Recording(part, max_rows, before), ""
    workers = asyncio.run(_attention_workers(scheduler))
    try:
        asyncio.run(_read_workers(recording, workers, seconds))
    except KeyboardInterrupt:
        pass
    except MoesaicError as error:  # what was recorded until then is whole
        problem = str(error)
    if recording.steps:
        _write(file, recording)
    if problem:
        raise CommandError(problem)
    if not recording.steps:
        raise CommandError("nothing was recorded, because no request was running", Exit.UNHEALTHY)


async def _read_workers(recording: "Recording", workers: dict[str, str], seconds: float) -> None:
    """Record what workers serve, and say so when one of them watches."""
    import asyncio

    from moesaic.cli.clients.traces import record as read

    async def tell() -> None:
        await recording.begun.wait()
        say(f"recording {', '.join(workers)} for {seconds:g} s")

    telling = asyncio.create_task(tell())
    try:
        await read(recording, workers, seconds)
    finally:
        telling.cancel()


async def _attention_workers(scheduler: str) -> dict[str, str]:
    from moesaic.cli.clients.fleet import fleet_addresses
    from moesaic.cli.clients.scheduler import scheduler_address

    found = await fleet_addresses(scheduler_address(scheduler))
    workers = {name: address for name, (role, address) in found.items() if role == "attention"}
    if not workers:
        raise CommandError("no attention worker is registered", Exit.UNHEALTHY)
    return workers


def _require_writable(file: Path) -> None:
    """Refuse a file that cannot be written, before anything is recorded."""
    new = _new(file)
    with using(file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        new.touch()
        new.unlink()


def _new(file: Path) -> Path:
    return file.with_name(file.name + ".new")


def _write(file: Path, recording: "Recording") -> None:
    new = _new(file)
    with using(file):
        new.write_bytes(recording.trace().encode())
        os.replace(new, file)
    say(f"{file}: {len(recording.steps)} steps, {recording.rows} rows of {recording.part}")
    if dropped := sum(recording.dropped.values()):
        say(f"{dropped} steps more were dropped: they came faster than they could be read")


def _read(file: Path) -> "Trace":
    from moesaic.placement.traffic.trace import Trace

    with using(file), correcting(str(file)):
        return Trace.decode(file.read_bytes())
