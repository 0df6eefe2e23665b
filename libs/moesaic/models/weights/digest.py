"""A digest of every byte of a model's weights, computed beside loading and remembered from start to start.

It tells damage, mix-ups and other fine-tunes. XXH3 is no protection from an attacker who can choose the bytes.
"""

import asyncio
import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import structlog
import xxhash

from moesaic.errors import CheckpointError, NotReady, PassingCheckpointError
from moesaic.models.weights.header import Stamp
from moesaic.native.compile import cache_directory

log = structlog.get_logger()

VERSION = 1  # of what is remembered, and of the digest
CHUNK_BYTES = 1 << 25  # what one thread does at a time
_READ_BYTES = 1 << 18  # stays in a core's cache
_NUM_THREADS = 4
_LOOK_AGAIN_S = 0.05

Wanted = Callable[[], bool]


@asynccontextmanager
async def digesting(files: Mapping[Path, Stamp]) -> AsyncIterator["asyncio.Future[str]"]:
    """Compute the digest of ``files`` on threads for the length of the block; leaving it ends them.

    Gives:
        A future of what ``weights_digest`` returns or raises.
    """
    stop = threading.Event()
    executor = ThreadPoolExecutor(1, thread_name_prefix="digest")
    running = asyncio.get_running_loop().run_in_executor(
        executor, partial(weights_digest, files, wanted=lambda: not stop.is_set())
    )
    try:
        yield running
    finally:
        stop.set()
        with suppress(CheckpointError, NotReady):
            await running
        executor.shutdown(wait=False)


def weights_digest(
    files: Mapping[Path, Stamp], home: Path | None = None, *, wanted: Wanted = lambda: True
) -> str:
    """Compute 128 bits over the names and all bytes of ``files``, in hex.

    A file's digest is remembered by its path, size, inode and time of change. Of several processes
    one reads a file, and the others wait for it. If nothing can be remembered, it only takes longer.

    Args:
        files: each as it was when its header was read.
        home: directory of the cached digests; by default ``digests`` in the user's cache directory.
        wanted: called now and then; once it is false, the work ends early.

    Raises:
        CheckpointError: a file cannot be read, or is not as it was.
        NotReady: it is no longer wanted.
    """
    whole = xxhash.xxh3_128(f"moesaic weights {VERSION}\n".encode())
    for path in sorted(files):
        try:
            digest = remembered_digest(path, home, wanted)
            if Stamp.of(path.stat()) != files[path]:
                raise PassingCheckpointError(path.name, "has changed while it was read")
        except OSError as error:
            raise CheckpointError.unreadable(path.name, error) from error
        whole.update(f"{path.name} {files[path].size} {digest}\n".encode())
    return whole.hexdigest()


def remembered_digest(path: Path, home: Path | None = None, wanted: Wanted = lambda: True) -> str:
    """Compute ``file_digest``, or recall it; raises what ``weights_digest`` raises."""
    home = cache_directory() / "digests" if home is None else home
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    memory = home / f"{name}.json"
    with _alone(memory.with_suffix(".lock"), wanted):
        known = _what_tells(path)
        digest = _recall(memory, known)
        if digest is None:
            began = time.monotonic()
            digest = file_digest(path, wanted)
            size, seconds = path.stat().st_size, round(time.monotonic() - began, 3)
            log.info("weights.digested", file=path.name, bytes=size, seconds=seconds)
            if _what_tells(path) == known:
                _remember(memory, {**known, "digest": digest})
    return digest


def file_digest(path: Path, wanted: Wanted = lambda: True) -> str:
    """Compute 128 bits over all bytes of a file, in hex, by a few threads: over the digests of its chunks.

    Raises:
        OSError: it cannot be read.
        NotReady: it is no longer wanted.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        with ThreadPoolExecutor(min(_NUM_THREADS, os.cpu_count() or 1), "digest") as threads:
            digests = threads.map(
                lambda start: _chunk_digest(
                    file.fileno(), start, min(size, start + CHUNK_BYTES), wanted
                ),
                range(0, size, CHUNK_BYTES),
            )
            return xxhash.xxh3_128_hexdigest(b"".join(digests))


def _chunk_digest(descriptor: int, start: int, end: int, wanted: Wanted) -> bytes:
    if not wanted():
        raise NotReady("the digest is no longer wanted")
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_READ_BYTES))
    while start < end:
        count = os.preadv(descriptor, [buffer[: end - start]], start)
        if not count:
            raise OSError("it has become shorter while it was read")
        digest.update(buffer[:count])
        start += count
    return digest.digest()


def _what_tells(path: Path) -> dict[str, str | int]:
    """Collect facts of a file, one of which changes whenever its bytes do."""
    status = path.stat()
    return {
        "version": VERSION,
        "path": str(path.resolve()),
        "size": status.st_size,
        "device": status.st_dev,
        "inode": status.st_ino,
        "changed_ns": status.st_ctime_ns,  # nobody can set it back, as they can ``st_mtime_ns``
    }


def _recall(memory: Path, known: Mapping[str, str | int]) -> str | None:
    try:
        stored = json.loads(memory.read_bytes())
    except (OSError, ValueError):
        return None
    digest = stored.pop("digest", None) if isinstance(stored, dict) else None
    return digest if isinstance(digest, str) and stored == known else None


def _remember(memory: Path, content: Mapping[str, str | int]) -> None:
    """Remember one file's digest; the record appears whole or not at all."""
    with suppress(OSError), tempfile.NamedTemporaryFile(dir=memory.parent, delete=False) as file:
        try:
            file.write(json.dumps(content).encode())
            file.flush()
            os.replace(file.name, memory)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


@contextmanager
def _alone(lock: Path, wanted: Wanted) -> Iterator[None]:
    """Keep other processes of this machine out for the length of the block, if that can be done."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        log.warning("weights.not_remembered", directory=str(lock.parent), cause=str(error))
        yield
        return
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wanted():
                    raise NotReady("the digest is no longer wanted") from None
                time.sleep(_LOOK_AGAIN_S)
            except OSError:  # a file system without locks: each for itself
                break
        yield
