"""One tenant's files, batches and responses, each in a directory of its own."""

import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moesaic.batch.state import Batch, CancelAsked, advance
from moesaic.errors import InvalidInput, MoesaicError
from moesaic.services.gateway.files.disk import (
    NoSuch,
    entries,
    made_at,
    new_directory,
    read_document,
    remove_directory,
    remove_unfinished,
    used_bytes,
    write_document,
)
from moesaic.services.gateway.files.responses import MAX_RESPONSES, ResponseShelf

_FILE_ID = re.compile(r"file-[0-9a-f]{28}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{28}")
_STALE_S = 86400.0  # by then an upload has ended, well or not
MAX_FILES = 10_000  # of a tenant: each of them makes it slower to find out how much room is left


class QuotaExceeded(MoesaicError):
    """The tenant's files and batches fill its quota."""

    code = "storage_quota_exceeded"
    http_status = 413
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(self, most: str) -> None:
        what = f"this key may keep {most}, and there would be more"
        super().__init__(f"{what}; delete files that are not needed")


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file as callers see it; times are seconds since 1970."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch on the disk."""

    batch: Batch
    output_expires_s: int | None = None  # after their making; None: with everything else


class Shelf:
    """One tenant's files and batches. All methods do file work and raise OSError.

    Args:
        root: the tenant's directory.
        quota_bytes: most bytes in it.

    Attributes:
        responses: the tenant's stored responses.
    """

    def __init__(self, root: Path, quota_bytes: int) -> None:
        self.root, self.quota_bytes = root, quota_bytes
        self._files, self._batches = root / "files", root / "batches"
        self.responses = ResponseShelf(root / "responses")

    # Files

    def room_bytes(self) -> int:
        """Count the bytes that are left; below 0 if there are too many already."""
        return self.quota_bytes - used_bytes(self.root)

    def check_room(self, *, more_bytes: int = 0, more_files: int = 0) -> None:
        """Make sure that there is room for so much more.

        Raises:
            QuotaExceeded: there is not.
        """
        if self.room_bytes() < more_bytes:
            raise QuotaExceeded(f"{self.quota_bytes} bytes of files and batches")
        if more_files and len(self.file_ids()) + more_files > MAX_FILES:
            raise QuotaExceeded(f"{MAX_FILES} files")

    @contextmanager
    def new_file(self, file_id: str) -> Iterator[Path]:
        """Make a file: the block writes ``content`` and calls ``finish_file`` in the directory it gets."""
        with new_directory(self._files / file_id) as directory:
            yield directory

    @staticmethod
    def finish_file(directory: Path, file: StoredFile) -> None:
        """Complete a file that is being made: its content is written."""
        write_document(directory / "file.json", file)

    def file(self, file_id: str) -> StoredFile:
        """Read the description of a file.

        Raises:
            NoSuch: the file is not there.
        """
        file = read_document(self._file(file_id) / "file.json", StoredFile)
        if file is None or (file.expires_at is not None and file.expires_at <= time.time()):
            raise NoSuch("file", file_id)
        return file

    def content(self, file_id: str) -> Path:
        """Name the path of a file's content."""
        return self._file(file_id) / "content"

    def file_ids(self) -> list[str]:
        """List all ids, the latest first."""
        return [name for name in entries(self._files) if _FILE_ID.fullmatch(name)]

    def delete_file(self, file_id: str) -> None:
        """Forget a file. A batch that was made from it has a hold of its own on the content.

        Raises:
            NoSuch: the file is not there.
        """
        self.file(file_id)
        remove_directory(self._file(file_id))

    def _file(self, file_id: str) -> Path:
        if not _FILE_ID.fullmatch(file_id):
            raise NoSuch("file", file_id)
        return self._files / file_id

    # Batches

    def add_batch(self, record: BatchRecord) -> None:
        """Keep a new batch, with its input.

        Raises:
            NoSuch: the input has been deleted meanwhile.
        """
        batch = record.batch
        with new_directory(self._batches / batch.id) as directory:
            write_document(directory / "batch.json", record)
            try:
                os.link(self.content(batch.input_file_id), directory / "input.jsonl")
            except FileNotFoundError:
                raise NoSuch("file", batch.input_file_id) from None
            except OSError:  # not every file system lets a file have two names
                shutil.copyfile(self.content(batch.input_file_id), directory / "input.jsonl")

    def record(self, batch_id: str) -> BatchRecord:
        """Read the record of a batch.

        Raises:
            NoSuch: the batch is not there.
        """
        record = read_document(self.batch_directory(batch_id) / "batch.json", BatchRecord)
        if record is None:
            raise NoSuch("batch", batch_id)
        return record

    def batch(self, batch_id: str) -> Batch:
        """Read a batch as its caller sees it: its runner may not have heard of a cancellation yet.

        Raises:
            NoSuch: the batch is not there.
        """
        batch = self.record(batch_id).batch
        asked = self.cancel_asked_at(batch_id)
        if asked is not None and batch.status in ("validating", "in_progress"):
            return advance(batch, CancelAsked(), asked)
        return batch

    def keep(self, record: BatchRecord) -> None:
        """Replace the record of a batch; only the process that carries it out may do so."""
        write_document(self.batch_directory(record.batch.id) / "batch.json", record)

    def batch_ids(self) -> list[str]:
        """List all ids, the latest first."""
        return [name for name in entries(self._batches) if _BATCH_ID.fullmatch(name)]

    def ask_cancel(self, batch_id: str) -> Batch:
        """Ask the process that carries a batch out, now or later, to cancel it.

        Raises:
            NoSuch: the batch is not there.
            InvalidInput: the batch has ended.
        """
        batch = self.batch(batch_id)
        if batch.ended and batch.status != "cancelled":
            raise InvalidInput("batch_id", f"the batch cannot be cancelled: it is {batch.status}")
        if batch.status in ("validating", "in_progress"):
            (self.batch_directory(batch_id) / "cancel").touch(exist_ok=True)
        return self.batch(batch_id)

    def cancel_asked_at(self, batch_id: str) -> int | None:
        """Read when a cancellation was asked for, if it was."""
        try:
            return int((self.batch_directory(batch_id) / "cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def batch_directory(self, batch_id: str) -> Path:
        """Name the directory of a batch, with its input and its results until it has ended."""
        if not _BATCH_ID.fullmatch(batch_id):
            raise NoSuch("batch", batch_id)
        return self._batches / batch_id

    # All

    def make_room_for_responses(self, num_bytes: int) -> int:
        """Have the oldest responses make room for new ones.

        Args:
            num_bytes: of the next one.

        Returns:
            The bytes that are left.

        Raises:
            QuotaExceeded: files and batches leave too few.
        """
        self.responses.trim(MAX_RESPONSES)
        room = self.room_bytes()
        freed = self.responses.make_room(num_bytes - room) if room < num_bytes else 0
        if room + freed < num_bytes:
            raise QuotaExceeded(f"{self.quota_bytes} bytes of files and batches")
        return room + freed

    def sweep(self, now: float, keep_s: float) -> None:
        """Remove objects that have expired, are old enough, damaged or not, or were never finished."""
        for directory in (self._files, self._batches):
            remove_unfinished(directory, now - _STALE_S)
        self.responses.sweep(now - _STALE_S, now - keep_s)
        for file_id in self.file_ids():
            file = read_document(self._file(file_id) / "file.json", StoredFile)
            expires_at = file.expires_at if file is not None else None
            if min(expires_at or math.inf, made_at(file_id) + keep_s) < now:
                remove_directory(self._file(file_id))
        for batch_id in self.batch_ids():
            kept = read_document(self.batch_directory(batch_id) / "batch.json", BatchRecord)
            if (kept is None or kept.batch.ended) and made_at(batch_id) + keep_s < now:
                remove_directory(self.batch_directory(batch_id))
