"""The input of a run over a file of requests: a file, a compressed file, or standard input."""

import contextlib
import gzip
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from moesaic.cli.terminal.outcome import using

STANDARD = Path("-")


@contextmanager
def opened_input(source: Path) -> Iterator[BinaryIO]:
    """Open a file of lines that can be read more than once; ``.gz`` is decompressed.

    Args:
        source: ``-`` for standard input, which is copied first.

    Raises:
        CommandError: they cannot be read.
    """
    with using(f"--input-file {source}"), contextlib.ExitStack() as files:
        if source == STANDARD:
            copy = files.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(sys.stdin.buffer, copy)
            yield copy
        elif source.suffix == ".gz":
            unpacked: Any = files.enter_context(gzip.open(source))
            yield unpacked
        else:
            yield files.enter_context(source.open("rb"))


def measured(lines: BinaryIO) -> tuple[str, int]:
    """Read all lines once, and go back to their beginning.

    Returns:
        The SHA-256 of the content, in hexadecimal, and the number of lines that are not blank.
    """
    lines.seek(0)
    digest, total = hashlib.sha256(), 0
    for line in lines:
        digest.update(line)
        total += not line.isspace()
    lines.seek(0)
    return digest.hexdigest(), total
