"""Seals on all values in Redis: proof that a process of the cluster wrote them, under this name.

    version (1 byte), mac (32), writer (8), number (8), message

Redis can tell roles apart, not the workers of a role: the password of one expert worker allows
writing the keys of all of them. So readers accept only sealed values that are newer than the last.

The mac is HMAC-SHA256, by a key made from the secret, of cluster, name and all that follows it. The
writer is a random id of the process; its numbers only grow, and are milliseconds since 1970.
Without a secret the form is the same, with a key that is public.
"""

import hmac
import secrets
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import Counter

from moesaic.cluster.security.tokens import derived_key

REFUSED = Counter(
    "moesaic_redis_refused",
    "Documents and entries rejected because no service of the cluster wrote them",
    ["what"],
)

_VERSION = b"\x01"
_MAC_BYTES = 32
_STAMP = struct.Struct(">8sQ")
_HEAD_BYTES = 1 + _MAC_BYTES + _STAMP.size


class SealBroken(ValueError):
    """A value was not written under its name with this cluster's secret."""


class Opened(NamedTuple):
    """The content of a sealed value."""

    message: bytes
    writer: bytes  # 8 bytes, drawn by the process that wrote it
    number: int  # milliseconds since 1970 by the writer's clock; grows with everything it writes


class Seals:
    """Maker and opener of one cluster's seals; one per process.

    Args:
        secret: the cluster's secret; may be empty.
        cluster: name of the cluster.
        clock: seconds since 1970.
    """

    def __init__(self, secret: bytes, cluster: str, clock: Callable[[], float] = time.time) -> None:
        self._key = derived_key(secret, f"redis seal v1 {cluster}")
        self._clock, self._writer, self._number = clock, secrets.token_bytes(8), 0

    def seal(self, name: str, message: bytes) -> bytes:
        """Seal a message for storage under ``name``, a key or a stream."""
        self._number = max(self._number + 1, int(self._clock() * 1000))
        stamped = _STAMP.pack(self._writer, self._number) + message
        return _VERSION + self._mac(name, stamped) + stamped

    def open(self, name: str, value: bytes) -> Opened:
        """Open a value that was found under ``name``.

        Raises:
            SealBroken: it was not sealed for that name with this secret.
        """
        mac, stamped = value[1 : 1 + _MAC_BYTES], value[1 + _MAC_BYTES :]
        if len(value) < _HEAD_BYTES or value[:1] != _VERSION:
            raise SealBroken("it has no seal")
        if not hmac.compare_digest(self._mac(name, stamped), mac):
            raise SealBroken("it was not sealed for this name with this cluster's secret")
        writer, number = _STAMP.unpack_from(stamped)
        return Opened(stamped[_STAMP.size :], writer, number)

    def age_s(self, number: int) -> float:
        """Give the age of a message, by the clocks of writer and reader."""
        return self._clock() - number / 1000

    def _mac(self, name: str, stamped: bytes) -> bytes:
        return hmac.digest(self._key, name.encode() + b"\0" + stamped, "sha256")
