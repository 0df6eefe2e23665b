"""Classify many rows at once over REST."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from moesaic.cli.gateway_client import client_settings, problem_of
from moesaic.cli.rows import BadRow, Row

RETRY_WAITS_S = (0.5, 1.0, 2.0)
LONGEST_WAIT_S = 10.0
BUSY_STATUSES = frozenset({429, 503})

Result = dict[str, Any]


async def classify_rows(
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
        concurrency: how many requests run at once.
        done: gets each row with its result, in the order of completion:
            ``{"id", "label", "index", "probs"}``, with ``"correct"`` where the right label is
            known, or ``{"id", "error": {"code", "message"}}``.
    """
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(limits=limits, **client_settings(url)) as client:

        async def work() -> None:
            for row in rows:  # all workers take from the same iterator
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
    """Classify one row; a busy or restarting gateway is asked again, as nothing is changed by it."""
    body = {**request, "input": row.text, "labels": list(row.labels)}
    for waits_s in (*RETRY_WAITS_S, None):
        try:
            response = await client.post("/v1/classify", json=body)
        except httpx.HTTPError as error:
            failure = _failed(row, "unreachable", str(error) or type(error).__name__)
        except UnicodeEncodeError:  # JSON can escape half a character, UTF-8 has no bytes for it
            return _failed(row, "invalid_row", "its text or labels hold half a surrogate pair")
        else:
            if response.is_success:
                return _result(row, response)
            problem = problem_of(response)
            failure = _failed(row, problem["code"], problem["message"])
            if response.status_code not in BUSY_STATUSES:
                return failure
            waits_s = waits_s and _wait_s(response, waits_s)
        if waits_s is not None:
            await asyncio.sleep(waits_s)
    return failure


def _wait_s(response: httpx.Response, otherwise_s: float) -> float:
    """How long the server asks to wait, within reason."""
    try:
        return min(float(response.headers["Retry-After"]), LONGEST_WAIT_S)
    except (KeyError, ValueError):
        return otherwise_s


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
