"""The limits of one question to a helper, and the verdict that it takes more."""

from dataclasses import dataclass
from typing import Literal

Limit = Literal["time", "memory", "crash"]


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
