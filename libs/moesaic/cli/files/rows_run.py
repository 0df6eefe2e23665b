"""One run over a file of rows: classified by a gateway, counted, and written."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from moesaic.cli.clients.gateway import client_settings, first_model, problem_of, reported
from moesaic.cli.clients.retrying import post_json
from moesaic.cli.files.rows import BadRow, Row, read_rows
from moesaic.cli.files.tally import RowsTally
from moesaic.cli.terminal.console import progress_bar, say
from moesaic.cli.terminal.outcome import CommandError, Exit, using

MAX_TRIES = 4
SHOWN_ERRORS = 5

Result = dict[str, Any]


class RowsRun:
    """One pass over a file.

    Args:
        url: the gateway's address.
        request: the fields of ``/v1/classify`` that all rows share, but for the model.
        concurrency: requests at once.
    """

    def __init__(self, url: str, request: dict[str, Any], concurrency: int) -> None:
        self._url, self._request, self._concurrency = url, request, concurrency
        self.tally = RowsTally()
        self.started = False
        self.elapsed_s = 0.0

    def over(
        self, file: Path, labels: tuple[str, ...], limit: int | None, out: Path | None
    ) -> None:
        """Classify the rows of ``file``; each is counted, and written to ``out``, as it is done.

        Args:
            file: JSON lines, see ``read_rows``.
            labels: for rows without labels of their own.
            limit: number of rows to classify; None for all.
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
                asyncio.run(_classify_rows(self._url, rows, request, self._concurrency, done))
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
    with using(f"--out {out}"):
        # What UTF-8 has no bytes for, half a surrogate pair in an id, is written as JSON escapes it.
        return out.open("w", encoding="utf-8", errors="backslashreplace")


async def _classify_rows(
    url: str,
    rows: Iterator[Row | BadRow],
    request: dict[str, Any],
    concurrency: int,
    done: Callable[[Row | BadRow, Result], None],
) -> None:
    """Classify ``rows`` with up to ``concurrency`` requests at once.

    Args:
        url: the gateway's address.
        rows: read one by one, as requests become free.
        request: the fields that all requests share.
        concurrency: largest number of requests at once.
        done: gets each row with its result, in the order of completion:
            ``{"id", "label", "index", "probs"}``, with ``"correct"`` where the right label is
            known, or ``{"id", "error": {"code", "message"}}``.
    """
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(limits=limits, **client_settings(url)) as client:

        async def work() -> None:
            # All workers take from the same iterator.
            for row in rows:
                result = (
                    await _classify(client, row, request) if isinstance(row, Row) else _bad(row)
                )
                done(row, result)

        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())


def _bad(row: BadRow) -> Result:
    return _failed(row, "invalid_row", row.problem)


def _failed(row: Row | BadRow, code: object, message: str) -> Result:
    return {"id": row.row_id, "error": {"code": code, "message": message}}


async def _classify(client: httpx.AsyncClient, row: Row, request: dict[str, Any]) -> Result:
    """Classify one row."""
    body = {**request, "input": row.text, "labels": list(row.labels)}
    try:
        content = json.dumps(body, ensure_ascii=False).encode()
        response = await post_json(client, "/v1/classify", content, MAX_TRIES)
    except httpx.HTTPError as error:
        return _failed(row, "unreachable", str(error) or type(error).__name__)
    except UnicodeEncodeError:  # JSON can escape half a character, UTF-8 has no bytes for it
        return _failed(row, "invalid_row", "its text or labels hold half a surrogate pair")
    if not response.is_success:
        problem = problem_of(response)
        return _failed(row, problem["code"], problem["message"])
    return _result(row, response)


def _result(row: Row, response: httpx.Response) -> Result:
    try:
        answer = response.json()["data"][0]
        label, probs = str(answer["label"]), list(answer["probs"])
        index = row.labels.index(label)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return _failed(row, "bad_answer", f"not an answer of /v1/classify: {error!r}")
    result: Result = {"id": row.row_id, "label": label, "index": index, "probs": probs}
    if row.label is not None:
        result["correct"] = index == row.label
    return result
