"""One run over a file of requests: answered by a gateway, written in order, continued after a stop."""

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from moesaic.batch.answering import answer_all
from moesaic.batch.journal import Journal
from moesaic.batch.requests import BatchRequest, Line, read_requests
from moesaic.batch.results import Result, ResultTally, RouteAnswer, answered, unanswered
from moesaic.cli.clients.gateway import client_settings, first_model, problem_of, reported
from moesaic.cli.clients.retrying import post_json
from moesaic.cli.files.requests_input import STANDARD, measured, opened_input
from moesaic.cli.terminal.console import progress_bar, say
from moesaic.cli.terminal.outcome import CommandError, Exit, using

MAX_LINE_BYTES = 64 << 20
MAX_TRIES = 8  # of a request, which takes a minute
SHOWN_ERRORS = 5


class _Output(Protocol):
    tally: ResultTally

    def write(self, results: Sequence[Result]) -> None: ...


class _Printed:
    """Results on standard output."""

    def __init__(self) -> None:
        self.tally = ResultTally()

    def write(self, results: Sequence[Result]) -> None:
        for result in results:
            sys.stdout.buffer.write(result.encode())
            self.tally.add(result)
        sys.stdout.buffer.flush()


class RequestsRun:
    """One pass over a file.

    Args:
        url: the gateway's address.
        max_inflight: requests at once.

    Attributes:
        tally: of all results, those of earlier runs included.
        num_resumed: results that were there already.
        elapsed_s: duration of this run.
        started: true once there are results to report.
    """

    def __init__(self, url: str, max_inflight: int) -> None:
        self._url, self._max_inflight = url, max_inflight
        self.tally = ResultTally()
        self.num_resumed = 0
        self.elapsed_s = 0.0
        self.started = False
        self._num_shown = 0

    def over(self, source: Path, out: Path) -> None:
        """Answer the requests of ``source``; ``-`` stands for standard input and output.

        ``out`` appears when all requests have a result. Until then the results are in a hidden file
        beside it, and a later run over the same input continues there.

        Raises:
            CommandError: a file cannot be used, the gateway does not answer, or Ctrl-C.
        """
        with opened_input(source) as lines:
            digest, total = measured(lines)
            with reported(self._url), httpx.Client(**client_settings(self._url)) as client:
                # The gateway is there, and the key is right.
                first_model(client)
            requests = read_requests(lines, MAX_LINE_BYTES)
            if out == STANDARD:
                self._answer(requests, _Printed(), total)
                return
            if out.is_dir():
                raise CommandError(f"--output-file {out}: it is a directory", Exit.USAGE)
            if source != STANDARD and out.exists() and out.samefile(source):
                raise CommandError(f"--output-file {out}: it is the input", Exit.USAGE)
            partial = out.with_name(f".{out.name}.{digest[:16]}.partial")
            with using(f"--output-file {out}"), Journal(partial) as journal:
                _claim(journal, partial)
                rest = journal.resume(requests)
                self.num_resumed = journal.tally.total
                self._answer(rest, journal, total)
                journal.sync()
                os.replace(partial, out)

    def _answer(self, requests: Iterator[Line], output: _Output, total: int) -> None:
        self.tally, self.started = output.tally, True
        began = time.monotonic()
        with progress_bar() as bar:
            task = bar.add_task("requests", total=total, completed=self.num_resumed)

            def write(results: Sequence[Result]) -> None:
                output.write(results)
                self._show_errors(results)
                bar.advance(task, len(results))

            try:
                asyncio.run(self._answer_all(requests, write))
            except KeyboardInterrupt:
                raise CommandError(
                    "interrupted; repeat the command to continue", Exit.INTERRUPTED
                ) from None
            except BaseExceptionGroup as group:
                raise _first(group) from group
            finally:
                self.elapsed_s = time.monotonic() - began

    async def _answer_all(self, requests: Iterator[Line], write: Any) -> None:
        connections = self._max_inflight
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        async with httpx.AsyncClient(limits=limits, **client_settings(self._url)) as client:

            async def ask(request: BatchRequest) -> Result:
                return await self._ask(client, request)

            await answer_all(requests, ask, write, self._max_inflight)

    async def _ask(self, client: httpx.AsyncClient, request: BatchRequest) -> Result:
        try:
            response = await post_json(client, request.url, request.body, MAX_TRIES)
        except httpx.ReadTimeout:
            return unanswered(request.custom_id, "timeout", "the gateway did not answer in time")
        except httpx.HTTPError as error:
            why = f"{self._url} is gone ({error or type(error).__name__}); repeat the command to continue"
            raise CommandError(why, Exit.UNHEALTHY) from error
        if response.status_code == 401:
            raise CommandError(f"{problem_of(response)['message']}; repeat the command to continue")
        try:
            body = response.json()
        except ValueError:
            body = {"error": problem_of(response)}
        request_id = response.headers.get("x-request-id", "")
        return answered(request.custom_id, RouteAnswer(response.status_code, request_id, body))

    def _show_errors(self, results: Sequence[Result]) -> None:
        for result in results:
            if result.ok or self._num_shown > SHOWN_ERRORS:
                continue
            self._num_shown += 1
            if self._num_shown > SHOWN_ERRORS:
                say("more requests fail; the output has them all")
            else:
                say(f"{_name(result)}: {_problem(result)}")


def _name(result: Result) -> str:
    line = f"line {result.error.line}" if result.error is not None and result.error.line else ""
    return ", ".join(filter(None, (line, result.custom_id))) or "a request"


def _problem(result: Result) -> str:
    if result.error is not None:
        param = f"{result.error.param}: " if result.error.param else ""
        return f"{param}{result.error.message}"
    # There is one of the two.
    assert result.response is not None
    try:
        return str(result.response.body["error"]["message"])
    except (KeyError, TypeError):
        return f"status {result.response.status_code}"


def _claim(journal: Journal, partial: Path) -> None:
    try:
        fcntl.flock(journal.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandError(f"another run uses this file: {partial} is in use", Exit.USAGE) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
