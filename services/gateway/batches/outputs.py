"""The files that a batch leaves: answers in one, failures in the other."""

import hashlib
import os
import time

from moesaic.batch.results import decode_result
from moesaic.batch.state import Batch
from moesaic.services.gateway.files.shelf import BatchRecord, Shelf, StoredFile


def make_outputs(shelf: Shelf, record: BatchRecord) -> tuple[str | None, str | None]:
    """Make the files of a batch whose results are all written; doing so again changes nothing.

    Returns:
        The ids of the answers and of the failures; a file that would be empty is not made.
    """
    counts = record.batch.request_counts
    output_id = _make(shelf, record, "output", True) if counts.completed else None
    error_id = _make(shelf, record, "error", False) if counts.failed else None
    return output_id, error_id


def _make(shelf: Shelf, record: BatchRecord, kind: str, ok: bool) -> str:
    batch = record.batch
    file_id = _file_id(batch, kind)
    results = shelf.batch_directory(batch.id) / "results.jsonl"
    with shelf.new_file(file_id) as directory:
        with results.open("rb") as lines, (directory / "content").open("wb") as content:
            content.writelines(line for line in lines if decode_result(line).ok is ok)
            content.flush()
            os.fsync(content.fileno())
            num_bytes = content.tell()
        now = int(time.time())
        keep_s = record.output_expires_s
        file = StoredFile(
            id=file_id,
            bytes=num_bytes,
            created_at=now,
            expires_at=now + keep_s if keep_s is not None else None,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose="batch_output",
        )
        shelf.finish_file(directory, file)
    return file_id


def _file_id(batch: Batch, kind: str) -> str:
    """Make the same id at every attempt, in any process: a crash in between leaves no second file."""
    ended_at = batch.finalizing_at or batch.cancelling_at or batch.created_at
    name = hashlib.blake2b(f"{batch.id}/{kind}".encode(), digest_size=8).hexdigest()
    return f"file-{ended_at * 1000 + 999:012x}{name}"  # behind an input of the same second
