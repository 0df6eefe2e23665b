"""A helper: processes that answer questions within limits, started when needed and kept.

A question's verdict must not depend on what happened to a process before. A process that crashed, or
that ran out of memory after other questions, gets a successor, and the fresh one decides.
"""

import threading
from collections.abc import Sequence
from typing import Any

from moesaic.helper.frames import encode
from moesaic.helper.limits import Limits, TooMuch
from moesaic.helper.process import HelperProcess


class Helper:
    """Answers questions, by ``most`` processes at a time. Safe to use from several threads."""

    def __init__(
        self, module: str, arguments: Sequence[str], limits: Limits, *, most: int = 1
    ) -> None:
        """``module`` calls ``serving.serve`` when run. Nothing is started before the first question."""
        self._module, self._arguments, self._limits = module, arguments, limits
        self._places = threading.BoundedSemaphore(most)
        self._idle: list[HelperProcess] = []  # the last one used is the warmest, and the next

    def ask(self, question: Any) -> Any:
        """Have a question answered, both of which JSON can hold.

        Raises:
            TooMuch: the question takes more than the limits allow.
            NotReady: the process was ended or stopped from outside, or none can be started.
        """
        frame = encode(question)
        with self._places:
            process = self._taken()
            was_fresh = process.is_fresh
            try:
                return self._asked(process, frame)
            except TooMuch as verdict:
                if verdict.limit == "time" or (verdict.limit == "memory" and was_fresh):
                    raise
            return self._asked(self._started(), frame)

    def _asked(self, process: HelperProcess, frame: bytes) -> Any:
        try:
            answer = process.ask(frame)
        except BaseException:
            process.end()
            raise
        self._idle.append(process)
        return answer

    def _taken(self) -> HelperProcess:
        while self._idle:
            try:
                process = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if process.is_alive:
                return process
            process.end()
        return self._started()

    def _started(self) -> HelperProcess:
        return HelperProcess(self._module, self._arguments, self._limits)
