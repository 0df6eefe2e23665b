"""Models that a command is given by name: brought here before anything else begins."""

import functools
import os
import resource
import signal
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.cli.terminal.console import say
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.model_names import demo_model, repository_of

if TYPE_CHECKING:
    from moesaic.models.weights.hub import OnBytes

CLEAN_UP_S = 1.0  # for a download to end by itself
_HALF = ".incomplete"  # as huggingface_hub names them
_MOST_FILES = 1 << 16  # that are looked at


def given_model(model: str) -> str:
    """Give the model that a command was asked for, or else the demo's directory; never asks a network.

    Raises:
        CommandError: none was asked for, and there is no demo model on this machine.
    """
    demo = None if model else demo_model()
    if not model and demo is None:
        raise CommandError(
            "--model: the demo model is not on this machine: pip install moesaic-demo, or give a model directory, or "
            "a repository of the Hugging Face hub as owner/name",
            Exit.USAGE,
        )
    return model or str(demo)


def found_model(model: str, *, weights: bool = True) -> str:
    """Find the directory of a model; download a repository's, with progress in the terminal.

    Args:
        model: a directory, ``owner/name`` or ``owner/name@revision``.
        weights: with its weights.

    Returns:
        ``model`` itself if it is no repository's name.

    Raises:
        CommandError: it cannot be had, with the reason and the fix.
    """
    if repository_of(model) is None:
        return model
    from moesaic.cli.terminal.stages import Stages
    from moesaic.errors import MoesaicError

    try:
        with Stages(sizes=True) as stages:
            show = functools.partial(stages.show, f"downloading {model}")
            return str(_interruptible(model, weights, show))
    except MoesaicError as error:
        raise CommandError(str(error), Exit.UNHEALTHY if error.retryable else Exit.USAGE) from error


class _Interrupted(Exception):
    """Nobody waits for a download any more."""


def _interruptible(model: str, weights: bool, show: "OnBytes") -> Path:
    """Find a model on another thread: ``huggingface_hub`` would end whole files before it lets Ctrl-C through.

    Ctrl-C ends the process, and removes what a file in the middle has got.
    """
    from moesaic.models.weights.hub import local_model

    found: Future[Path] = Future()
    given_up = threading.Event()

    def on_bytes(done: int, total: int) -> None:
        if given_up.is_set():
            raise _Interrupted
        show(done, total)

    def find() -> None:
        try:
            found.set_result(local_model(model, weights=weights, on_bytes=on_bytes))
        except BaseException as error:
            found.set_exception(error)

    thread = threading.Thread(target=find, name="download", daemon=True)
    thread.start()
    try:
        return found.result()
    except KeyboardInterrupt:
        # The rest takes little more than a second.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say("moesaic: interrupted; repeat the command to fetch the missing files")
        given_up.set()
        thread.join(CLEAN_UP_S)
        _remove_half_files()
        # Threads of the hub may wait for the network still.
        os._exit(Exit.INTERRUPTED)


def _remove_half_files() -> None:
    """Remove the files that downloads of this process write now: none of them can be gone on with."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # No thread can begin another.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    for number in range(min(most, _MOST_FILES)):
        # That number is no open file.
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.endswith(_HALF):
                os.unlink(path)
