"""Records the first call of each of Moesaic's functions, in any Python process that finds this file on its path.

``docs.inside.paths`` puts it there. What is recorded now is the number in the first byte of ``$PATHS_OF/window``; with
0 nothing is. Each call that is new in a window becomes a line of ``$PATHS_OF/PID.calls``.
"""

import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[3]) + "/"
SOURCES = (f"{ROOT}libs/", f"{ROOT}services/")


def record(directory: Path) -> None:
    """Watch all threads of this process, until it ends."""
    with (directory / "window").open("rb") as file:
        window = mmap.mmap(file.fileno(), 1, prot=mmap.PROT_READ)
    calls = (directory / f"{os.getpid()}.calls").open("a", buffering=1, encoding="utf-8")
    calls.write(json.dumps(sys.orig_argv) + "\n")
    seen: dict[int, set[CodeType]] = {}

    def called(frame: FrameType, event: str, _: Any) -> None:
        number = window[0]
        # Coroutines and generators that go on are calls too.
        if not number or event != "call":
            return
        codes, code = seen.setdefault(number, set()), frame.f_code
        if code in codes:
            return
        codes.add(code)
        file = os.path.realpath(code.co_filename)
        if file.startswith(SOURCES):
            name = code.co_qualname.replace(".<locals>", "")
            calls.write(f"{number}\t{time.monotonic_ns()}\t{file[len(ROOT) :]}\t{name}\n")

    threading.setprofile(called)
    sys.setprofile(called)


if os.environ.get("PATHS_OF"):
    record(Path(os.environ["PATHS_OF"]))
