"""``moesaic classify``: one text, or a file of them."""

import contextlib
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moesaic.cli.console import print_json, print_table, progress_bar, say
from moesaic.cli.options import JsonOption, UrlOption
from moesaic.cli.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.cli.rows import BadRow, Row
    from moesaic.cli.tally import Tally

SHOWN_ERRORS = 5

Method = Literal["auto", "token", "choice", "sequence"]


def classify(
    text: Annotated[str | None, typer.Argument(help="The text to classify.")] = None,
    labels: Annotated[
        str, typer.Option(help="Labels, comma-separated; with --file, for rows that have none.")
    ] = "",
    instruction: Annotated[str, typer.Option(help="What to decide, in one sentence.")] = "",
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
        _classify_file(address, file, out, names, request, concurrency, limit, verbose, as_json)
    elif len(names) < 2:
        raise CommandError("--labels: give at least two, separated by commas", Exit.USAGE)
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


def _classify_file(
    url: str,
    file: Path,
    out: Path | None,
    labels: tuple[str, ...],
    request: dict[str, Any],
    concurrency: int,
    limit: int | None,
    verbose: bool,
    as_json: bool,
) -> None:
    import httpx

    from moesaic.cli.gateway_client import client_settings, first_model, reported
    from moesaic.cli.rows import read_rows

    total = min(sum(1 for _ in read_rows(file)), limit or 1 << 62)
    with reported(url), httpx.Client(**client_settings(url)) as client:
        request = {"model": first_model(client), **request}
    rows = islice(read_rows(file, labels), limit)
    run = _FileRun(url, request, concurrency)
    interrupted = run.over(rows, total, out)
    _report(run, verbose, as_json)
    if interrupted:
        raise CommandError("interrupted", Exit.INTERRUPTED)
    if not run.tally.answered:
        raise CommandError("no row was classified", Exit.ERROR)


class _FileRun:
    """One pass over a file."""

    def __init__(self, url: str, request: dict[str, Any], concurrency: int) -> None:
        from moesaic.cli.tally import Tally

        self._url, self._request, self._concurrency = url, request, concurrency
        self.tally: Tally = Tally()
        self.elapsed_s = 0.0

    def over(self, rows: "Iterator[Row | BadRow]", total: int, out: Path | None) -> bool:
        """Classify the rows; true if Ctrl-C ended it. What is done is counted, and is in ``out``."""
        import asyncio

        from moesaic.cli.batch import classify_rows

        started = time.monotonic()
        results = _opened(out) if out else contextlib.nullcontext()
        with results as sink, progress_bar() as bar:
            task = bar.add_task("rows", total=total)

            def done(row: "Row | BadRow", result: dict[str, Any]) -> None:
                if sink is not None:
                    sink.write(json.dumps(result, ensure_ascii=False) + "\n")
                    sink.flush()
                self._count(row, result)
                bar.advance(task)

            try:
                asyncio.run(classify_rows(self._url, rows, self._request, self._concurrency, done))
            except KeyboardInterrupt:
                return True
            finally:
                self.elapsed_s = time.monotonic() - started
        return False

    def _count(self, row: "Row | BadRow", result: dict[str, Any]) -> None:
        from moesaic.cli.rows import Row

        if "error" in result or not isinstance(row, Row):
            self.tally.errors += 1
            if self.tally.errors <= SHOWN_ERRORS:
                say(f"row {result['id']}: {result['error']['message']}")
            elif self.tally.errors == SHOWN_ERRORS + 1:
                say("more rows fail; --out has them all")
            return
        self.tally.add(result["label"], None if row.label is None else row.labels[row.label])


def _opened(out: Path) -> Any:
    try:
        return out.open("w", encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}", Exit.USAGE) from error


def _report(run: _FileRun, verbose: bool, as_json: bool) -> None:
    tally = run.tally
    rows_per_s = tally.answered / run.elapsed_s if run.elapsed_s else 0.0
    if as_json:
        print_json(_summary(tally, rows_per_s, run.elapsed_s))
        return
    print(
        f"{tally.answered} rows in {run.elapsed_s:.1f} s ({rows_per_s:.1f} rows/s), {tally.errors} errors"
    )
    if tally.accuracy is not None and tally.interval is not None:
        low, high = tally.interval
        print(
            f"accuracy {tally.accuracy:.4f} (95 % interval {low:.4f} to {high:.4f}) on {tally.judged} rows"
        )
    if verbose:
        print_table(
            ("label", "rows", "predicted", "correct", "recall", "precision"),
            [
                (name, c.rows, c.predicted, c.correct, f"{c.recall:.3f}", f"{c.precision:.3f}")
                for name, c in sorted(tally.labels.items())
            ],
        )


def _summary(tally: "Tally", rows_per_s: float, elapsed_s: float) -> dict[str, Any]:
    """What ``--json`` prints: counts, accuracy with its interval, speed, and the labels' counts."""
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
