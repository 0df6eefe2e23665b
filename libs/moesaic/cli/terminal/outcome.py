"""The end of a command: exit statuses, and the error that carries one."""

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
