"""Results written so far: the first part of the output, which a later run continues."""

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType

from moesaic.batch.requests import Line
from moesaic.batch.results import Result, ResultTally, decode_result


class Journal:
    """A file of results, in the order of the input. One process writes it at a time.

    Attributes:
        tally: counts over all its results.
        num_bytes: its size.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a+b")
        self.tally = ResultTally()
        self.num_bytes = 0

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def resume(self, lines: Iterator[Line]) -> Iterator[Line]:
        """Count existing results, and give the lines that have no result yet.

        The file is cut at the first result that does not match its line, such as half a line after a crash.
        Those requests are sent again.
        """
        self.tally, self.num_bytes = ResultTally(), 0
        self._file.seek(0)
        rest: Iterator[Line] = lines
        for line in lines:
            found = self._file.readline()
            if not _is_result_of(line, found, self.tally):
                rest = chain([line], lines)
                break
            self.num_bytes += len(found)
        self._file.truncate(self.num_bytes)
        self._file.seek(self.num_bytes)
        return rest

    def write(self, results: Sequence[Result]) -> None:
        """Append results; they outlive this process, even if it is killed."""
        encoded = b"".join(result.encode() for result in results)
        self._file.write(encoded)
        self._file.flush()
        self.num_bytes += len(encoded)
        for result in results:
            self.tally.add(result)

    def fileno(self) -> int:
        """Give the file's descriptor, for a lock on it."""
        return self._file.fileno()

    def sync(self) -> None:
        """Make the results survive a loss of power, too."""
        os.fsync(self.fileno())


def _is_result_of(line: Line, found: bytes, tally: ResultTally) -> bool:
    try:
        result = decode_result(found)
    except ValueError:
        return False
    if result.custom_id != line.custom_id:
        return False
    tally.add(result)
    return True
