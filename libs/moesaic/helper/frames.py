"""Frames between a helper and its parent: the length of some JSON, then the JSON."""

import json
import struct
from typing import Any

HEAD = struct.Struct("<I")
# Lone surrogates, which JSON can spell, must not fail here: the question's answer says what is wrong.
_SURROGATES = "surrogatepass"


def encode(value: Any) -> bytes:
    """Encode a value that JSON can hold."""
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", _SURROGATES)
    return HEAD.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Any:
    """Decode what ``encode`` has put behind its head."""
    return json.loads(body.decode("utf-8", _SURROGATES))
