"""``moesaic classify``: one text, or a file of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moesaic.cli.terminal.console import print_json, print_table
from moesaic.cli.terminal.options import JsonOption, UrlOption, valid_text
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.cli.files.rows_run import RowsRun
    from moesaic.cli.files.tally import RowsTally

Method = Literal["auto", "token", "choice", "sequence", "multi"]


def classify(
    text: Annotated[
        str | None, typer.Argument(help="The text to classify.", callback=valid_text)
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="Labels, comma-separated; with --file, for rows without labels.",
            callback=valid_text,
        ),
    ] = "",
    instruction: Annotated[
        str, typer.Option(help="Question to answer, in one sentence.", callback=valid_text)
    ] = "",
    method: Annotated[Method, typer.Option(help="Method of scoring labels.")] = "auto",
    file: Annotated[
        Path | None,
        typer.Option(help='JSON lines {"id","text","labels","label"}, also compressed (.gz).'),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write one result per row to this file.")] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of concurrent requests.")
    ] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Classify only the first rows.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify TEXT, or the rows of --file, into labels given with the request."""
    from moesaic.cli.clients.gateway import gateway_url

    names = tuple(name.strip() for name in labels.split(",") if name.strip())
    request: dict[str, Any] = {"method": method}
    if instruction:
        request["instruction"] = instruction
    if (text is None) == (file is None):
        raise CommandError("give either TEXT or --file", Exit.USAGE)
    address = gateway_url(url)
    if file is not None:
        from moesaic.cli.files.rows_run import RowsRun

        run = RowsRun(address, request, concurrency)
        try:
            run.over(file, names, limit, out)
        finally:  # also what was done before Ctrl-C
            if run.started:
                _report(run, as_json)
    elif len(names) < (1 if method == "multi" else 2):
        fix = "give at least two, separated by commas; --method multi also takes one"
        raise CommandError(f"--labels: {fix}", Exit.USAGE)
    else:
        _classify_text(address, {**request, "input": text, "labels": names}, as_json)


def _classify_text(url: str, request: dict[str, Any], as_json: bool) -> None:
    import httpx

    from moesaic.cli.clients.gateway import client_settings, first_model, reported

    with reported(url), httpx.Client(**client_settings(url)) as client:
        response = client.post("/v1/classify", json={"model": first_model(client), **request})
        response.raise_for_status()
        answer = response.json()["data"][0]
    if as_json:
        print_json(answer)
    else:
        rows = [(entry["label"], f"{entry['prob']:.4f}") for entry in answer["labels"]]
        print_table(("label", "probability"), rows)


def _report(run: "RowsRun", as_json: bool) -> None:
    """Print the counts of a run."""
    tally = run.tally
    rows_per_s = tally.answered / run.elapsed_s if run.elapsed_s else 0.0
    if as_json:
        print_json(_summary(tally, rows_per_s, run.elapsed_s))
        return
    speed = f"{run.elapsed_s:.1f} s ({rows_per_s:.1f} rows/s)"
    print(f"{tally.answered} rows in {speed}, {tally.errors} errors")
    if tally.accuracy is not None and tally.interval is not None:
        low, high = tally.interval
        interval = f"95 % interval {low:.4f} to {high:.4f}"
        print(f"accuracy {tally.accuracy:.4f} ({interval}) on {tally.judged} rows")


def _summary(tally: "RowsTally", rows_per_s: float, elapsed_s: float) -> dict[str, Any]:
    """Counts, accuracy with its interval, speed, and the labels' counts, for ``--json``."""
    return {
        "rows": tally.answered + tally.errors,
        "answered": tally.answered,
        "errors": tally.errors,
        "judged": tally.judged,
        "accuracy": tally.accuracy,
        "interval_95": tally.interval,
        "elapsed_s": round(elapsed_s, 3),
        "rows_per_s": round(rows_per_s, 3),
        "labels": {
            name: {"rows": count.rows, "predicted": count.predicted, "correct": count.correct}
            for name, count in sorted(tally.labels.items())
        },
    }
