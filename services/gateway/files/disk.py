"""File work: documents that are whole or not there, and errors that callers understand."""

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from moesaic.batch.answering import to_its_end
from moesaic.errors import MoesaicError

log = structlog.get_logger()

BLOCK_BYTES = 4096  # the least that anything kept is counted as
_NEW = ".new-"  # begins the names of what is being made
T = TypeVar("T")
Document = TypeVar("Document", bound=msgspec.Struct)


class NoSuch(MoesaicError):
    """Nothing with this id is kept for this tenant."""

    code = "not_found"
    http_status = 404
    grpc_status = "NOT_FOUND"

    def __init__(self, kind: str, object_id: str) -> None:
        super().__init__(f"no such {kind}: {object_id[:100]!r}")


class StorageUnavailable(MoesaicError):
    """The directory of files cannot be read or written now."""

    code = "storage_unavailable"
    http_status = 503
    grpc_status = "UNAVAILABLE"
    retryable = True
    retry_after_s = 10.0

    def __init__(self) -> None:
        super().__init__("files cannot be kept or read at the moment")


async def on_disk(work: Callable[[], T]) -> T:
    """Do file work off the event loop.

    Raises:
        StorageUnavailable: the disk is full, broken or away; the log says which.
    """
    try:
        return await to_its_end(work)
    except OSError as error:
        log.error("storage.failed", cause=error.strerror or type(error).__name__)
        raise StorageUnavailable from error


def new_id(prefix: str) -> str:
    """Make a fresh id. Later ones sort after earlier ones, and nobody can guess them."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"


def made_at(object_id: str) -> float:
    """Read from an id when it was made, in seconds since 1970; its object may be damaged."""
    return int(object_id[-28:-16], 16) / 1000


def write_document(path: Path, document: msgspec.Struct) -> None:
    """Replace a document; readers get the old or the new one, even after a loss of power."""
    write_whole(path, msgspec.json.encode(document))


def write_whole(path: Path, content: bytes) -> None:
    """Do the same with the bytes of a document."""
    new = path.with_name(f"{_NEW}{path.name}")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)
    sync_names(path.parent)


def read_document(path: Path, kind: type[Document]) -> Document | None:
    """Read a document; None if it is not there, or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        log.error("document.damaged", of=path.parent.name, document=path.name)
        return None


@contextlib.contextmanager
def new_directory(place: Path) -> Iterator[Path]:
    """Make ``place`` as a whole: it is there once the block is left without an error, or was there before."""
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = place.with_name(f"{_NEW}{secrets.token_hex(8)}")
    new.mkdir(mode=0o700)
    try:
        yield new
        try:
            os.rename(new, place)
        except OSError:
            # Else somebody made the very same one before a crash.
            if not place.exists():
                raise
        sync_names(place.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def sync_names(directory: Path) -> None:
    """Keep the names in a directory, made, changed and removed, over a loss of power, too."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_directory(directory: Path) -> None:
    """Remove a directory as a whole: nobody finds half of it."""
    old = directory.with_name(f"{_NEW}{secrets.token_hex(8)}")
    try:
        os.rename(directory, old)
    except FileNotFoundError:
        return
    shutil.rmtree(old, ignore_errors=True)


def entries(directory: Path) -> list[str]:
    """List the names in a directory, without those being made; the latest come first."""
    try:
        return sorted((n for n in os.listdir(directory) if not n.startswith(".")), reverse=True)
    except FileNotFoundError:
        return []


def remove_unfinished(directory: Path, older_than: float) -> None:
    """Remove directories that a crash left half made."""
    for leftover in directory.glob(f"{_NEW}*"):
        # Another process may be at it.
        with contextlib.suppress(FileNotFoundError):
            if leftover.is_dir() and leftover.stat().st_mtime < older_than:
                shutil.rmtree(leftover, ignore_errors=True)


def in_blocks(num_bytes: int) -> int:
    """Count what so many bytes of one file are counted as."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def used_bytes(directory: Path) -> int:
    """Count the bytes below a directory; a file with several names counts once."""
    seen: set[int] = set()
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                found = os.stat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                total += in_blocks(found.st_size)
    return total
