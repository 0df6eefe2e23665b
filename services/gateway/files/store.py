"""The directory of files, batches and responses, which several gateways may share."""

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from moesaic.errors import InvalidInput
from moesaic.services.gateway.access import TenantLimited
from moesaic.services.gateway.files.disk import entries, in_blocks, sync_names
from moesaic.services.gateway.files.responses import ConversationTooLarge, StoredResponse
from moesaic.services.gateway.files.shelf import BatchRecord, Shelf

MAX_UNFINISHED = 100  # batches of one tenant
CHECK_EVERY = 100  # responses of a tenant, between two looks for room, each of which looks at all that it keeps
_TENANT = "tenant-"
_ORPHAN_S = 600.0  # by then a batch that was announced has been made


class Unfinished(NamedTuple):
    """A batch that has not ended."""

    tenant: str
    batch_id: str

    @property
    def name(self) -> str:
        """The name of its lock; tenants' names have no tilde."""
        return f"{self.batch_id}~{self.tenant}"


class Store:
    """All files and batches, tenant by tenant.

    The process that holds the lock of an unfinished batch carries it out and is the only one to change its record. The
    lock ends with that process, however it ends.

    Args:
        root: the directory; it is made unless it is there.
        quota_bytes: most bytes of each tenant.
        keep_s: time for which files and ended batches are kept.

    Attributes:
        added: set when a batch was added by this process.

    Raises:
        InvalidInput: there can be no such directory.
    """

    def __init__(self, root: Path, quota_bytes: int, keep_s: float) -> None:
        self._root, self._quota_bytes, self._keep_s = root.absolute(), quota_bytes, keep_s
        self._unfinished = self._root / "unfinished"
        self.added = asyncio.Event()
        # Responses, and bytes of them, that each tenant may have before the next look for room.
        self._unchecked: dict[str, tuple[int, int]] = {}
        try:
            # mkdir gives its mode to the last one alone, and "moesaic up" refuses a directory that is open to others.
            for directory in (*reversed(self._root.parents), self._root):
                directory.mkdir(exist_ok=True, mode=0o700)
            self._unfinished.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidInput("--files-dir", f"cannot use {root}: {error.strerror}") from error

    def of(self, tenant: str) -> Shelf:
        """Open the shelf of a tenant."""
        return Shelf(self._root / f"{_TENANT}{tenant}", self._quota_bytes)

    def check_response_room(self, tenant: str, num_bytes: int, most: int) -> None:
        """Make sure that there is room for one more response of a tenant, if its oldest ones go.

        Args:
            tenant: whose it is.
            num_bytes: of its document, as far as they are known.
            most: bytes that it may have.

        Raises:
            ConversationTooLarge: it has more.
            QuotaExceeded: there is no room.
        """
        ConversationTooLarge.check(num_bytes, most)
        left, room_bytes = self._unchecked.get(tenant, (0, 0))
        size = in_blocks(num_bytes)
        if not left or room_bytes < size:
            room_bytes = self.of(tenant).make_room_for_responses(size)
            left = CHECK_EVERY
        self._unchecked[tenant] = left, room_bytes

    def add_response(
        self, tenant: str, response_id: str, stored: StoredResponse, most: int
    ) -> None:
        """Keep a new response of a tenant.

        Raises:
            ConversationTooLarge: it has more bytes than ``most``.
            QuotaExceeded: there is no room.
        """
        document = msgspec.json.encode(stored)
        self.check_response_room(tenant, len(document), most)
        self.of(tenant).responses.add(response_id, document)
        left, room_bytes = self._unchecked[tenant]
        self._unchecked[tenant] = left - 1, room_bytes - in_blocks(len(document))

    def add_batch(self, tenant: str, record: BatchRecord) -> None:
        """Keep a new batch, and have it carried out.

        Raises:
            TenantLimited: the tenant has too many that have not ended.
            NoSuch: its input is not there.
        """
        if sum(batch.tenant == tenant for batch in self.unfinished()) >= MAX_UNFINISHED:
            what = f"{MAX_UNFINISHED} batches of this key have not ended, which is all it may have"
            raise TenantLimited("too_many_batches", what, 60.0)
        announced = self._unfinished / Unfinished(tenant, record.batch.id).name
        # Before the batch itself, or nobody would find it after a crash in between.
        announced.touch()
        sync_names(self._unfinished)
        try:
            self.of(tenant).add_batch(record)
        except BaseException:
            announced.unlink(missing_ok=True)
            raise

    def unfinished(self) -> list[Unfinished]:
        """List the batches that have not ended, the oldest first."""
        found = []
        for name in reversed(entries(self._unfinished)):
            batch_id, _, tenant = name.partition("~")
            found.append(Unfinished(tenant, batch_id))
        return found

    @contextmanager
    def claimed(self, batch: Unfinished) -> Iterator[bool]:
        """Claim a batch for the length of the block; false: another process has it, or it has ended."""
        path = self._unfinished / batch.name
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield False
            return
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                # Else it ended while this one was opening the lock.
                yield path.exists()
        finally:
            os.close(lock)

    def settle(self, batch: Unfinished) -> None:
        """Note that a batch has ended; only the process that has claimed it may do so."""
        (self._unfinished / batch.name).unlink(missing_ok=True)

    def is_orphan(self, batch: Unfinished) -> bool:
        """Tell if a batch was announced, and then never made."""
        try:
            announced = (self._unfinished / batch.name).stat().st_mtime
        except FileNotFoundError:
            return True
        return announced < time.time() - _ORPHAN_S

    def sweep(self) -> None:
        """Remove objects that need not be kept any longer."""
        for name in entries(self._root):
            if name.startswith(_TENANT):
                self.of(name.removeprefix(_TENANT)).sweep(time.time(), self._keep_s)
