"""Server-sent events: how a stream is written, kept alive and always ended."""

from typing import Any

import msgspec

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encoder = msgspec.json.Encoder()
# Line separators to many a client's line splitter, though JSON lets them stand unescaped.
_SEPARATORS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def event(value: Any) -> bytes:
    """Encode one event that carries ``value`` as JSON."""
    text = _encoder.encode(value)
    for separator, escaped in _SEPARATORS:
        if separator in text:
            text = text.replace(separator, escaped)
    return b"data: " + text + b"\n\n"
