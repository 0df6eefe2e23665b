"""One claimed batch, carried out from any state to its end: answers go into one file, failures into another."""

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable
from itertools import count

import msgspec
import structlog

from moesaic.batch.answering import answer_all
from moesaic.batch.journal import Journal
from moesaic.batch.requests import MAX_LINES, BadLine, BatchRequest, read_requests
from moesaic.batch.results import Result, decode_result, unanswered
from moesaic.batch.state import (
    AllWritten,
    Batch,
    CancelAsked,
    Event,
    Finalized,
    LineError,
    Progressed,
    Rejected,
    Validated,
    advance,
)
from moesaic.services.gateway.files.disk import on_disk
from moesaic.services.gateway.files.shelf import BatchRecord, Shelf, StoredFile

log = structlog.get_logger()
LOOK_EVERY_S = 1.0  # for a cancellation, the end of the window, and how far it is
ROOM_EVERY = 10  # looks between two of how much room is left
MAX_ERRORS = 100  # of an input, that are told
_WHY = {
    "cancelled": "the batch was cancelled before this request was answered",
    "expired": "the completion window ended before this request was answered",
}
_NO_ROOM = "there was no room for more results: the files of this key take as much as they may"
Ask = Callable[[BatchRequest], Awaitable[Result]]


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
    # Behind an input of the same second.
    return f"file-{ended_at * 1000 + 999:012x}{name}"


class Carrier:
    """One batch on its way.

    Args:
        shelf: of its tenant.
        record: the batch as it is now.
        ask: answers one of its requests; cancelled when the batch is stopped.
        max_line_bytes: longest line of the input.
        max_inflight: its requests at once.
    """

    def __init__(
        self, shelf: Shelf, record: BatchRecord, ask: Ask, max_line_bytes: int, max_inflight: int
    ) -> None:
        self._shelf, self._record, self._ask = shelf, record, ask
        self._max_line_bytes, self._max_inflight = max_line_bytes, max_inflight
        self._directory = shelf.batch_directory(record.batch.id)
        self._stopped = asyncio.Event()
        self._has_room = True
        self._keeping = asyncio.Lock()

    @property
    def batch(self) -> Batch:
        """The batch as it is now."""
        return self._record.batch

    async def to_the_end(self) -> None:
        """Go on until the batch has ended. After any interruption the record on the disk is enough to go on.

        Raises:
            StorageUnavailable: the disk is full, broken or away.
        """
        if not self.batch.ended:
            await self._look_for_cancellation()
            if not self.batch.request_counts.total:
                await self._apply(await on_disk(self._validation))
        if not self.batch.ended:
            await self._answer()
            output_id, error_id = await on_disk(lambda: make_outputs(self._shelf, self._record))
            await self._apply(Finalized(output_id, error_id))
        await on_disk(self._tidy)

    def _validation(self) -> Validated | Rejected:
        """Read the whole input once."""
        errors: list[LineError] = []
        total = 0
        with (self._directory / "input.jsonl").open("rb") as lines:
            for line in read_requests(
                lines, self._max_line_bytes, self.batch.endpoint, 2 * MAX_LINES
            ):
                total += 1
                if isinstance(line, BadLine):
                    errors.append(LineError(line.code, line.message, line.param, line.number))
                elif total > MAX_LINES:
                    what = f"a batch may have at most {MAX_LINES} requests"
                    errors.append(LineError("too_many_requests", what, None, line.number))
                    break
                if len(errors) == MAX_ERRORS:
                    break
        if not total:
            errors.append(LineError("empty_file", "the input has no requests"))
        return Rejected(errors) if errors else Validated(total)

    async def _answer(self) -> None:
        """Get a result for every request that has none."""
        with (
            (self._directory / "input.jsonl").open("rb") as lines,
            Journal(self._directory / "results.jsonl") as journal,
        ):
            requests = read_requests(lines, self._max_line_bytes, self.batch.endpoint)
            rest = await on_disk(lambda: journal.resume(requests))
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(journal))
                await answer_all(rest, self._ask_unless_stopped, journal.write, self._max_inflight)
                watching.cancel()
            await on_disk(journal.sync)
            if self.batch.finalizing_at is None:
                await self._apply(AllWritten(journal.tally))

    async def _watch(self, journal: Journal) -> None:
        """Keep the batch's record true; stop the batch when it is time."""
        for looks in count():
            await self._look_for_cancellation()
            if self.batch.stop_reason(_now()) is not None:
                self._stopped.set()
            # Making the files takes as much again as the results.
            if looks % ROOM_EVERY == 0:
                room = await on_disk(self._shelf.room_bytes)
                self._has_room = room > journal.num_bytes
            if self.batch.finalizing_at is None:
                await self._apply(Progressed(journal.tally))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask_unless_stopped(self, request: BatchRequest) -> Result:
        if not self._stopped.is_set() and self._has_room:
            asking = asyncio.ensure_future(self._ask(request))
            stopping = asyncio.ensure_future(self._stopped.wait())
            try:
                await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
            finally:
                asking.cancel()
                stopping.cancel()
                await asyncio.gather(asking, stopping, return_exceptions=True)
        if not self._stopped.is_set():
            return unanswered(request.custom_id, "storage_quota_exceeded", _NO_ROOM)
        reason = "expired" if self.batch.cancelling_at is None else "cancelled"
        return unanswered(request.custom_id, f"batch_{reason}", _WHY[reason])

    async def _look_for_cancellation(self) -> None:
        if self.batch.status in ("validating", "in_progress"):
            asked_at = await on_disk(lambda: self._shelf.cancel_asked_at(self.batch.id))
            if asked_at is not None:
                await self._apply(CancelAsked(), asked_at)
        if self.batch.cancelling_at is not None:
            self._stopped.set()

    async def _apply(self, event: Event, now: int | None = None) -> None:
        async with self._keeping:
            batch = advance(self.batch, event, _now() if now is None else now)
            if batch == self.batch:
                return
            before = self.batch.status
            await on_disk(lambda: self._keep(batch))
            if batch.status != before:
                log.info("batch.changed", batch_id=batch.id, status=batch.status)

    def _keep(self, batch: Batch) -> None:
        """Change the record on the disk and the one in memory together, also if nobody waits for it any more."""
        record = msgspec.structs.replace(self._record, batch=batch)
        self._shelf.keep(record)
        self._record = record

    def _tidy(self) -> None:
        """Leave nothing behind but the batch itself and its files."""
        for name in ("input.jsonl", "results.jsonl", "cancel"):
            (self._directory / name).unlink(missing_ok=True)


def _now() -> int:
    return int(time.time())
