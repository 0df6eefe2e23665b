"""``moesaic run-batch``: a file of requests in OpenAI's batch format."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.terminal.console import print_json, say
from moesaic.cli.terminal.options import JsonOption, UrlOption
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.cli.files.requests_run import RequestsRun


def run_batch(
    source: Annotated[
        Path,
        typer.Option(
            "--input-file",
            "-i",
            help='JSON lines {"custom_id","method","url","body"}, also compressed (.gz); - is standard input.',
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("--output-file", "-o", help="One result per line; - is standard output."),
    ],
    max_inflight: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of concurrent requests.")
    ] = 32,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer the requests of a file, in its order; repeat the command to continue a stopped run."""
    from moesaic.cli.clients.gateway import gateway_url
    from moesaic.cli.files.requests_input import STANDARD
    from moesaic.cli.files.requests_run import RequestsRun

    to_standard = out == STANDARD
    if as_json and to_standard:
        raise CommandError("--json: the results already use standard output", Exit.USAGE)
    run = RequestsRun(gateway_url(url), max_inflight)
    try:
        run.over(source, out)
    finally:  # also what was done before Ctrl-C
        if run.started and as_json:
            print_json(_summary(run))
        elif run.started:
            say(_report(run)) if to_standard else print(_report(run))
    if run.tally.failed:
        raise CommandError(f"{run.tally.failed} of {run.tally.total} requests failed")


def _report(run: "RequestsRun") -> str:
    tally, fresh = run.tally, run.tally.total - run.num_resumed
    before = f", after {run.num_resumed} of an earlier run" if run.num_resumed else ""
    speed = f"{run.elapsed_s:.1f} s ({_per_s(run):.1f} requests/s)"
    tokens = f"{tally.prompt_tokens} prompt tokens, {tally.completion_tokens} generated"
    return f"{fresh} requests in {speed}{before}; {tally.failed} failed; {tokens}"


def _summary(run: "RequestsRun") -> dict[str, Any]:
    tally = run.tally
    return {
        "requests": tally.total,
        "completed": tally.completed,
        "failed": tally.failed,
        "resumed": run.num_resumed,
        "prompt_tokens": tally.prompt_tokens,
        "completion_tokens": tally.completion_tokens,
        "elapsed_s": round(run.elapsed_s, 3),
        "requests_per_s": round(_per_s(run), 3),
    }


def _per_s(run: "RequestsRun") -> float:
    return (run.tally.total - run.num_resumed) / run.elapsed_s if run.elapsed_s else 0.0
