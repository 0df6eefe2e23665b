"""Seals on what is written to Redis: who knows the cluster's secret wrote it, under this name.

    version (1 byte), mac (32), writer (8), number (8), message

Redis can tell roles apart, not the workers of a role: whoever has the password of one expert worker
may write all their keys, and read what was ever written. So readers believe what is sealed, and of
that what is newer than the last. The mac is HMAC-SHA256, by a key made from the secret, of cluster,
name and all that follows it. The writer is drawn once a process; its numbers only grow, and are
milliseconds since 1970. Without a secret the key is everyone's, and the form the same.
"""

import hmac
import secrets
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from moesaic.cluster.keys import derived_key

_VERSION = b"\x01"
_MAC_BYTES = 32
_STAMP = struct.Struct(">8sQ")
_HEAD_BYTES = 1 + _MAC_BYTES + _STAMP.size


class SealBroken(ValueError):
    """What was read was not written under that name by anyone who knows the secret."""


class Opened(NamedTuple):
    """What a seal held."""

    message: bytes
    writer: bytes  # 8 bytes, drawn by the process that wrote it
    number: int  # milliseconds since 1970 by the writer's clock; grows with everything it writes


class Seals:
    """Makes and opens the seals of one cluster; one a process.

    Args:
        secret: the cluster's; may be empty.
        cluster: its name.
        clock: seconds since 1970.
    """

    def __init__(self, secret: bytes, cluster: str, clock: Callable[[], float] = time.time) -> None:
        self._key = derived_key(secret, f"redis seal v1 {cluster}")
        self._clock, self._writer, self._number = clock, secrets.token_bytes(8), 0

    def seal(self, name: str, message: bytes) -> bytes:
        """A message as it is stored under ``name``, a key or a stream."""
        self._number = max(self._number + 1, int(self._clock() * 1000))
        stamped = _STAMP.pack(self._writer, self._number) + message
        return _VERSION + self._mac(name, stamped) + stamped

    def open(self, name: str, value: bytes) -> Opened:
        """What is in a value that was found under ``name``.

        Raises:
            SealBroken: it was not sealed there with this secret.
        """
        mac, stamped = value[1 : 1 + _MAC_BYTES], value[1 + _MAC_BYTES :]
        if len(value) < _HEAD_BYTES or value[:1] != _VERSION:
            raise SealBroken("it has no seal")
        if not hmac.compare_digest(self._mac(name, stamped), mac):
            raise SealBroken("it was not sealed for this name with this cluster's secret")
        writer, number = _STAMP.unpack_from(stamped)
        return Opened(stamped[_STAMP.size :], writer, number)

    def age_s(self, number: int) -> float:
        """How long ago a message was written, by the clocks of writer and reader."""
        return self._clock() - number / 1000

    def _mac(self, name: str, stamped: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + stamped, "sha256")
