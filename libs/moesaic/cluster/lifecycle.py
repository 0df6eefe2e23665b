"""The end of a service's process: by a signal, by its operator, or by an error."""

import asyncio
import gc
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, Literal, NoReturn

import structlog

from moesaic.errors import CheckpointError, InUse, InvalidInput, MoesaicError
from moesaic.open_files import raise_file_limit
from moesaic.telemetry.shortage import first_line, ran_out_of_memory

log = structlog.get_logger()

OTHER_PLACE = "free memory of its device or machine, or see 'moesaic plan' for what it needs"
EXIT_ERROR = 1
EXIT_USAGE = 2  # no restart can help
EXIT_UNHEALTHY = 3  # something this process needs cannot be reached


class StopEvent(asyncio.Event):
    """An event that is set once the process shall stop.

    If it is set during the start, before any part waits for it, the start is cut short: ``task`` is
    cancelled.
    """

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        super().__init__()
        self._task, self._awaited, self.cut_short = task, False, False

    async def wait(self) -> Literal[True]:
        """Wait until the process shall stop."""
        self._awaited = True
        return await super().wait()

    def set(self) -> None:
        """Ask the process to stop; asking again changes nothing."""
        if not self.is_set() and not self._awaited:
            self.cut_short = True
            self._task.cancel()
        super().set()


@asynccontextmanager
async def stop_event() -> AsyncIterator[StopEvent]:
    """Give an event that the first SIGTERM or SIGINT sets; a second signal exits at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    # A coroutine always runs in a task.
    assert task is not None
    stop = StopEvent(task)

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("service.stopping", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    except asyncio.CancelledError:
        if not stop.cut_short:
            raise
        task.uncancel()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def run_service(
    serve: Coroutine[Any, Any, None],
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> NoReturn:
    """Run a service to its end, in asyncio's own event loop or another, and exit: 0, or as ``exit_with`` says."""
    raise_file_limit()
    # What was imported stays: to look through it for garbage would stop the process for 0.1 s now and then.
    gc.freeze()
    gc.enable()
    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(serve)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        exit_with(error)
    sys.exit(0)


def exit_with(error: Exception) -> NoReturn:
    """End this process by an error of its start or of its parts, after one line on standard error.

    | status | means |
    |---|---|
    | 1 | another error; one that is not ours is a bug, and has its traceback on standard error |
    | 2 | a setting or a file of the model has to be corrected: a restart cannot help |
    | 3 | a resource that this process needs is unavailable: a restart may help |
    """
    causes = [_told(leaf) for leaf in _leaves(error)]
    ours = [cause for cause in causes if isinstance(cause, MoesaicError)]
    if len(ours) < len(causes):
        traceback.print_exception(error)
        _exit_at_once(EXIT_ERROR)
    cause = next(filter(_lasts, ours), ours[0])
    print(f"error: {cause}", file=sys.stderr)
    if _lasts(cause):
        _exit_at_once(EXIT_USAGE)
    _exit_at_once(EXIT_UNHEALTHY if cause.retryable else EXIT_ERROR)


def _told(cause: BaseException) -> BaseException:
    """Return the error to show; memory that ran out is no bug."""
    if not ran_out_of_memory(cause):
        return cause
    return InUse("memory", f"{first_line(cause) or 'none is left'}; {OTHER_PLACE}")


def _exit_at_once(status: int) -> NoReturn:
    """Exit without waiting for threads: one may wait for a peer that the error has kept from coming."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _lasts(cause: MoesaicError) -> bool:
    """True for an error that a restart cannot cure."""
    return isinstance(cause, InvalidInput | CheckpointError) and not cause.retryable


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
