"""``moesaic classify``: one text, or a file of them."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moesaic.cli.console import print_json, print_table
from moesaic.cli.options import JsonOption, UrlOption, valid_text
from moesaic.cli.outcome import CommandError, Exit

Method = Literal["auto", "token", "choice", "sequence", "multi"]


def classify(
    text: Annotated[
        str | None, typer.Argument(help="The text to classify.", callback=valid_text)
    ] = None,
    labels: Annotated[
        str,
        typer.Option(
            help="Labels, comma-separated; with --file, for rows that have none.",
            callback=valid_text,
        ),
    ] = "",
    instruction: Annotated[
        str, typer.Option(help="What to decide, in one sentence.", callback=valid_text)
    ] = "",
    method: Annotated[Method, typer.Option(help="How labels are scored.")] = "auto",
    file: Annotated[
        Path | None,
        typer.Option(help='JSON lines {"id","text","labels","label"}; may be compressed (.gz).'),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write one result per row to this file.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests at once.")] = 16,
    limit: Annotated[int | None, typer.Option(min=1, help="Classify only the first rows.")] = None,
    verbose: Annotated[bool, typer.Option(help="With --file: a table of the labels.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Classify TEXT, or the rows of --file, into labels given with the request."""
    from moesaic.cli.gateway_client import gateway_url

    names = tuple(name.strip() for name in labels.split(",") if name.strip())
    request: dict[str, Any] = {"method": method}
    if instruction:
        request["instruction"] = instruction
    if (text is None) == (file is None):
        raise CommandError("give either TEXT or --file", Exit.USAGE)
    address = gateway_url(url)
    if file is not None:
        from moesaic.cli.classify_file import FileRun, report

        run = FileRun(address, request, concurrency)
        try:
            run.over(file, names, limit, out)
        finally:  # also what was done before Ctrl-C
            if run.started:
                report(run, verbose, as_json)
    elif len(names) < (1 if method == "multi" else 2):
        fix = "give at least two, separated by commas; --method multi also takes one"
        raise CommandError(f"--labels: {fix}", Exit.USAGE)
    else:
        _classify_text(address, {**request, "input": text, "labels": names}, as_json)


def _classify_text(url: str, request: dict[str, Any], as_json: bool) -> None:
    import httpx

    from moesaic.cli.gateway_client import client_settings, first_model, reported

    with reported(url), httpx.Client(**client_settings(url)) as client:
        response = client.post("/v1/classify", json={"model": first_model(client), **request})
        response.raise_for_status()
        answer = response.json()["data"][0]
    if as_json:
        print_json(answer)
    else:
        rows = [(entry["label"], f"{entry['prob']:.4f}") for entry in answer["labels"]]
        print_table(("label", "probability"), rows)
