"""Values of Redis as messages; all values that processes read there pass here.

A value counts as absent if it is too large, of another kind than is read here, or not sealed for this
name by a process of the cluster. So does a message whose parts contradict each other.
"""

from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from moesaic.cluster.redis.seals import Opened, SealBroken, Seals

T = TypeVar("T")
Decoder = msgspec.msgpack.Decoder

MAX_BYTES = 16 << 20  # of a value or an entry; the placement of a thousand workers takes one
MAX_NUMBER = 1 << 53
_MAX_DIGITS = len(str(MAX_NUMBER))


class Unreadable(Exception):
    """A value that counts as absent.

    Attributes:
        foreign: no process of the cluster wrote it there.
        opened: the part below the seal, if there is a seal.
    """

    def __init__(self, why: str, *, foreign: bool = False, opened: Opened | None = None) -> None:
        self.foreign, self.opened = foreign, opened
        super().__init__(why)


@runtime_checkable
class Checked(Protocol):
    """A message whose parts depend on each other."""

    def checked(self) -> object:
        """Return the message itself, or raise ``InvalidInput``."""
        ...


def read_message(seals: Seals, name: str, value: bytes, decoder: Decoder[T]) -> tuple[T, Opened]:
    """Read what is stored under ``name``, a key or a stream.

    Raises:
        Unreadable: it counts as absent.
    """
    if len(value) > MAX_BYTES:
        raise Unreadable(f"it has {len(value)} bytes, {MAX_BYTES} at most can be read")
    try:
        opened = seals.open(name, value)
    except SealBroken as error:
        raise Unreadable(str(error), foreign=True) from error
    try:
        message = decoder.decode(opened.message)
        if isinstance(message, Checked):
            message.checked()
    except Exception as error:  # bytes that others chose can make a decoder fail in any way
        raise Unreadable(f"{type(error).__name__}: {error}", opened=opened) from error
    return message, opened


def read_number(value: bytes) -> int:
    """Read a number that is written in digits, without a seal.

    Raises:
        Unreadable: it counts as absent.
    """
    number = int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else None
    if number is None or number > MAX_NUMBER:
        raise Unreadable(f"not a number in 0..{MAX_NUMBER}", foreign=True)
    return number
