"""Warnings and errors of the services' logs, for the terminal."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

POLL_S = 0.3
REPEAT_S = 10.0
_LEVELS = frozenset({"warning", "error", "critical"})
_LEFT_OUT = frozenset({"ts", "level", "event", "service", "instance", "exception"})


class LogTail:
    """Reader of the lines that were appended to a log file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def new_lines(self) -> list[str]:
        """Read complete new lines, oldest first."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._position)
                content = log.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._position += len(complete)
        return complete.decode("utf-8", errors="replace").splitlines()


def warning_text(line: str) -> tuple[str, str] | None:
    """Turn a JSON log line into its event and a line for people; None below the level of a warning."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or entry.get("level") not in _LEVELS:
        return None
    event = str(entry.get("event", ""))
    fields = (f"{key}={value}" for key, value in entry.items() if key not in _LEFT_OUT)
    return event, " ".join([str(entry["level"]), event, *fields])[:400]


async def show_warnings(
    logs: Iterable[tuple[str, Path]], announce: Callable[[str, str], None]
) -> None:
    """Announce new warnings of the named logs until cancelled; the same event at most every ten seconds."""
    tails = [(name, LogTail(path)) for name, path in logs]
    shown: dict[tuple[str, str], float] = {}
    while True:
        for name, tail in tails:
            for line in tail.new_lines():
                found = warning_text(line)
                if found is None:
                    continue
                event, text = found
                now = time.monotonic()
                if now - shown.get((name, event), -REPEAT_S) >= REPEAT_S:
                    shown[name, event] = now
                    announce(name, text)
        await asyncio.sleep(POLL_S)
