"""Logs as JSON lines on standard output: ``ts level event service instance``, then the event's fields."""

import functools
import json
import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Hashable, MutableMapping
from datetime import UTC, datetime
from types import NoneType
from typing import Any

import msgspec
import structlog

from moesaic.errors import InvalidInput

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_SEVERITY = LEVELS | {"critical": 50, "exception": 40}
_SECRET_KEY = re.compile(r"(^|[_-])(authorization|api[_-]?key|password|token|secret|cookie)$", re.I)
_URL_CREDENTIALS = re.compile(r"(://)[^/\s@]*@")
_HIDDEN = "***"
_SAY_AGAIN_S, _MOST_PLACES = 10.0, 256
_TELLS_NOTHING = (int, float, NoneType)

Event = MutableMapping[str, Any]


class _Threshold:
    """The least severe level that is written; shared, so that bound loggers follow a change."""

    severity = LEVELS["info"]


class _Lines:
    """Writer of one line an event; a full disk or a closed pipe costs the line, not the process."""

    def msg(self, line: str) -> None:
        try:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            pass

    debug = info = warning = error = critical = exception = msg


class _LibraryHandler(logging.Handler):
    """Handler that writes the ``logging`` records of libraries as events.

    Input of strangers makes libraries log a lot. So each place in their code logs once in a while,
    with the number of records that were left out since.
    """

    def __init__(self) -> None:
        super().__init__()
        self._said: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()  # when, and left out

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[0] if record.exc_info else None
        place = record.name, record.pathname, record.lineno, error
        said_at, left_out = self._said.pop(place, (float("-inf"), 0))
        may = record.created >= said_at + _SAY_AGAIN_S or record.created < said_at
        self._said[place] = (record.created, 0) if may else (said_at, left_out + 1)
        while len(self._said) > _MOST_PLACES:
            self._said.popitem(last=False)
        if may:
            self._write(record, left_out)

    def _write(self, record: logging.LogRecord, left_out: int) -> None:
        level = record.levelname.lower()
        write = getattr(structlog.get_logger(), level if level in _SEVERITY else "warning")
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # the library's arguments do not fit its own format
            text = str(record.msg)
        more = {"left_out": left_out} if left_out else {}
        write("library.logged", logger=record.name, message=text, exc_info=record.exc_info, **more)


def configure_logging(service: str, instance: str, level: str) -> None:
    """Send this process's events to standard output as JSON lines, named after the process.

    Context variables bound with ``structlog.contextvars`` are merged into each event; values under
    keys that name a secret, and credentials in URLs, are hidden. Records of libraries are written
    from ``warning`` up.

    Raises:
        InvalidInput: ``level`` is not one of ``LEVELS``.
    """

    def name_process(_: Any, method: str, event: Event) -> Event:
        head = {
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": "error" if method == "exception" else method,
            "event": event.pop("event", ""),
            "service": service,
            "instance": instance,
        }
        return {**head, **event}

    set_level(level)
    structlog.configure(
        processors=[
            _drop_quiet,
            structlog.contextvars.merge_contextvars,
            name_process,
            structlog.dev.set_exc_info,
            structlog.processors.format_exc_info,
            _redact,
            structlog.processors.JSONRenderer(_as_json),
        ],
        wrapper_class=structlog.BoundLogger,
        logger_factory=lambda *_: _Lines(),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_LibraryHandler()], level=logging.WARNING, force=True)


def set_level(level: str) -> None:
    """Change the least severe level that this process writes.

    Raises:
        InvalidInput: ``level`` is not one of ``LEVELS``.
    """
    if level not in LEVELS:
        raise InvalidInput("level", f"must be one of {', '.join(LEVELS)}, got {level!r}")
    _Threshold.severity = LEVELS[level]


def _drop_quiet(_: Any, method: str, event: Event) -> Event:
    if _SEVERITY.get(method, 0) < _Threshold.severity:
        raise structlog.DropEvent
    return event


def _as_json(event: Event, **_: Any) -> str:
    try:
        return msgspec.json.encode(
            event, enc_hook=float
        ).decode()  # the hook is for numpy's numbers
    except UnicodeEncodeError:  # a text with half a surrogate pair, which is escaped
        return json.dumps(event, default=str)


def _redact(_: Any, __: str, event: Event) -> Event:
    return {
        key: value if isinstance(value, _TELLS_NOTHING) else _redacted(key, value)
        for key, value in event.items()
    }


def _redacted(key: str, value: Any) -> Any:
    """Turn a value into one that JSON has, without secrets."""
    if isinstance(value, _TELLS_NOTHING):
        return value
    if isinstance(value, dict):
        return {str(inner): _redacted(str(inner), item) for inner, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(key, item) for item in value]
    if _is_secret(key):
        return _HIDDEN
    text = str(value)
    return _URL_CREDENTIALS.sub(rf"\1{_HIDDEN}@", text) if "://" in text else text


@functools.lru_cache(maxsize=4096)  # keys are the same few in every line
def _is_secret(key: str) -> bool:
    return _SECRET_KEY.search(key) is not None
