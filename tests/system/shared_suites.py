"""Suites that several files of tests use: started when a test wants one, and stopped when others are wanted."""

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType

import pytest

from tests.suites import Suite, running

# At once, in one process of tests. Idle suites cost others time, but a test may want as many.
MOST_OPEN = 3
LOCAL = ("local", "--topology", "local")  # what others are compared with


class SharedSuites:
    """Keeps the suites that were wanted last."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        """Start nothing yet; each suite has a directory of its own."""
        self._directories = directories
        self._open: dict[
            str, tuple[Suite, ExitStack]
        ] = {}  # the one that was wanted last at the end

    def get(
        self, name: str, *flags: str, settings: Mapping[str, str] = MappingProxyType({})
    ) -> Suite:
        """Return a suite that runs, which may have been started for this.

        Args:
            name: of the suite; the same name has the same flags and settings each time.
            flags: of ``moesaic up``.
            settings: of its environment.
        """
        found = self._open.pop(name, None)
        if found is None:
            self._stop_all_but(MOST_OPEN - 1)
            with ExitStack() as starting:
                suite = starting.enter_context(
                    running(self._directories.mktemp(name), *flags, settings=settings)
                )
                found = suite, starting.pop_all()
        self._open[name] = found
        return found[0]

    def close(self) -> None:
        """Stop all of them."""
        with ExitStack() as all_of_them:  # of which one may not stop as it should
            for _, stop in self._open.values():
                all_of_them.push(stop)
            self._open.clear()

    def _stop_all_but(self, number: int) -> None:
        while len(self._open) > number:
            _, stop = self._open.pop(next(iter(self._open)))
            stop.close()
