"""Classify the rows of a file, and say how well it went."""

import asyncio
import contextlib
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from moesaic.cli.batch import Result, classify_rows
from moesaic.cli.console import print_json, print_table, progress_bar, say
from moesaic.cli.gateway_client import client_settings, first_model, reported
from moesaic.cli.outcome import CommandError, Exit
from moesaic.cli.rows import BadRow, Row, read_rows
from moesaic.cli.tally import Tally

SHOWN_ERRORS = 5


class FileRun:
    """One pass over a file.

    Args:
        url: the gateway's address.
        request: the fields of ``/v1/classify`` that all rows share, but for the model.
        concurrency: requests at once.
    """

    def __init__(self, url: str, request: dict[str, Any], concurrency: int) -> None:
        self._url, self._request, self._concurrency = url, request, concurrency
        self.tally = Tally()
        self.started = False
        self.elapsed_s = 0.0

    def over(
        self, file: Path, labels: tuple[str, ...], limit: int | None, out: Path | None
    ) -> None:
        """Classify the rows of ``file``; what is done is counted, and written to ``out``, at once.

        Args:
            file: JSON lines, see ``read_rows``.
            labels: of rows that have none of their own.
            limit: classify only that many rows.
            out: gets one result a row.

        Raises:
            CommandError: a file cannot be used, the gateway does not answer, Ctrl-C, or no row
                could be classified.
        """
        total = sum(1 for _ in islice(read_rows(file), limit))
        with reported(self._url), httpx.Client(**client_settings(self._url)) as client:
            request = {"model": first_model(client), **self._request}
        rows = islice(read_rows(file, labels), limit)
        started = time.monotonic()
        with _opened(out) if out else contextlib.nullcontext() as results, progress_bar() as bar:
            self.started = True
            task = bar.add_task("rows", total=total)

            def done(row: Row | BadRow, result: Result) -> None:
                if results is not None:
                    results.write(json.dumps(result, ensure_ascii=False) + "\n")
                    results.flush()
                self._count(row, result)
                bar.advance(task)

            try:
                asyncio.run(classify_rows(self._url, rows, request, self._concurrency, done))
            except KeyboardInterrupt:
                raise CommandError("interrupted", Exit.INTERRUPTED) from None
            finally:
                self.elapsed_s = time.monotonic() - started
        if not self.tally.answered:
            raise CommandError("no row was classified")

    def _count(self, row: Row | BadRow, result: Result) -> None:
        if "error" not in result and isinstance(row, Row):
            self.tally.add(result["label"], None if row.label is None else row.labels[row.label])
            return
        self.tally.errors += 1
        if self.tally.errors <= SHOWN_ERRORS:
            say(f"row {result['id']}: {result['error']['message']}")
        elif self.tally.errors == SHOWN_ERRORS + 1:
            say("more rows fail; the file of --out has them all")


def _opened(out: Path) -> Any:
    try:
        # What UTF-8 has no bytes for, half a surrogate pair in an id, is written as JSON escapes it.
        return out.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror}", Exit.USAGE) from error


def report(run: FileRun, verbose: bool, as_json: bool) -> None:
    """Print what came of a run."""
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
    if verbose:
        print_table(
            ("label", "rows", "predicted", "correct", "recall", "precision"),
            [
                (name, c.rows, c.predicted, c.correct, rate_text(c.recall), rate_text(c.precision))
                for name, c in sorted(tally.labels.items())
            ],
        )


def rate_text(rate: float | None) -> str:
    """A share for people."""
    return "-" if rate is None else f"{rate:.3f}"


def _summary(tally: Tally, rows_per_s: float, elapsed_s: float) -> dict[str, Any]:
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
