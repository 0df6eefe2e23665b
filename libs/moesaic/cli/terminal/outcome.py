"""The end of a command: exit statuses, and the error that carries one."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class Exit(IntEnum):
    """Exit statuses, the same for every command."""

    OK = 0
    ERROR = 1
    USAGE = 2
    UNHEALTHY = 3  # the suite or service in question is not running, or not ready
    TIMEOUT = 4
    INTERRUPTED = 130  # Ctrl-C, as shells count it


class CommandError(Exception):
    """Failure of a command: one line for people, and the exit status for programs."""

    def __init__(self, text: str, status: Exit = Exit.ERROR) -> None:
        self.status = status
        super().__init__(text)


@contextmanager
def using(what: object) -> Iterator[None]:
    """Turn failures of files within the block into wrong use.

    Args:
        what: the flag with the file's name, or the name alone.

    Raises:
        CommandError: a file cannot be read, decompressed or written.
    """
    try:
        yield
    except BrokenPipeError:  # of the output
        raise
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise CommandError(f"{what}: {why}", Exit.USAGE) from error


@contextmanager
def correcting(prefix: str = "") -> Iterator[None]:
    """Turn input that must be corrected into wrong use.

    Args:
        prefix: stands before the fix instead of the field's name.

    Raises:
        CommandError: naming the field and the fix.
    """
    from moesaic.errors import InvalidInput, PlacementInfeasible

    try:
        yield
    except InvalidInput as error:
        text = f"{prefix}: {error.fix}" if prefix else str(error)
        raise CommandError(text, Exit.USAGE) from error
    except PlacementInfeasible as error:
        raise CommandError(f"the model does not fit: {error}", Exit.USAGE) from error
