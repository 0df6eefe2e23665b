"""The limits of one question to a helper, and the frames in which questions and answers travel."""

import json
import struct
from dataclasses import dataclass
from typing import Any, Literal

Limit = Literal["time", "memory", "crash"]
HEAD = struct.Struct("<I")
# Lone surrogates, which JSON can spell, must not fail here: the question's answer says what is wrong.
_SURROGATES = "surrogatepass"


@dataclass(frozen=True)
class Limits:
    """The amounts that one question may take.

    Attributes:
        cpu_s: the processor's time, so a busy machine refuses nothing.
        memory_bytes: memory beyond what a helper has when it starts.
        memory_per_byte: more of it, for each byte of the question.
        answer_bytes: the longest answer; a longer one meets the limit of memory.
    """

    cpu_s: float
    memory_bytes: int
    memory_per_byte: int = 0
    answer_bytes: int = 1 << 16


class TooMuch(Exception):
    """A question takes more than its limits allow.

    Attributes:
        limit: the one that it meets; ``crash``: it ends any process that works on it.
    """

    def __init__(self, limit: Limit) -> None:
        self.limit: Limit = limit
        super().__init__(f"the question meets the limit of {limit}")


def encode(value: Any) -> bytes:
    """Encode a value that JSON can hold."""
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", _SURROGATES)
    return HEAD.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Any:
    """Decode what ``encode`` has put behind its head."""
    return json.loads(body.decode("utf-8", _SURROGATES))
