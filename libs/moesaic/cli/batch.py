"""Classify many rows at once over REST."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from moesaic.cli.asking import post_json
from moesaic.cli.gateway_client import client_settings, problem_of
from moesaic.cli.rows import BadRow, Row

MAX_TRIES = 4

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
