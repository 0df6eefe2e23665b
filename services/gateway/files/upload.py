"""Receiving an uploaded file: from the connection straight to the disk, a piece at a time."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from moesaic.batch.requests import MAX_FILE_BYTES
from moesaic.errors import InvalidInput, MoesaicError
from moesaic.services.gateway.files.disk import on_disk
from moesaic.services.gateway.files.shelf import Shelf

MAX_FORM_BYTES = MAX_FILE_BYTES + (64 << 10)  # with the fields beside the file
MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
WRITE_BYTES = 1 << 20  # what is held in memory
CHECK_BYTES = 16 << 20  # between two looks at how much room is left
_WANTED = "must be multipart/form-data with the parts purpose and file"


class FileTooLarge(MoesaicError):
    """No file may be this large."""

    code = "request_too_large"
    http_status = 413

    def __init__(self) -> None:
        super().__init__(f"a file may have at most {MAX_FILE_BYTES} bytes")


class _Form:
    """The parts of a form, as the parser finds them.

    Attributes:
        fields: all parts but the file.
        filename: of the part ``file``, once it has begun.
        pending: content of the file that is not written yet.
    """

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.pending = bytearray()
        self.ended = False
        self._num_parts = 0
        self._header = (bytearray(), bytearray())
        self._disposition = b""
        self._name = ""
        self._value = bytearray()

    def on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidInput("body", f"may have at most {MAX_PARTS} parts")
        self._disposition, self._name = b"", ""
        self._value.clear()

    def on_header_begin(self) -> None:
        self._header = (bytearray(), bytearray())

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def on_header_end(self) -> None:
        if bytes(self._header[0]).lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        if not self._name:
            raise InvalidInput("body", "a part has no name")
        if self._name == "file":
            if self.filename is not None:
                raise InvalidInput("file", "may appear only once")
            self.filename = options.get(b"filename", b"").decode(errors="replace")[:255]

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self.pending += data[start:end]
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise InvalidInput(self._name[:100], f"may have at most {MAX_FIELD_BYTES} bytes")

    def on_part_end(self) -> None:
        if self._name != "file":
            self.fields[self._name[:100]] = self._value.decode(errors="replace")

    def on_end(self) -> None:
        self.ended = True


class Uploaded:
    """An uploaded form, its file written."""

    def __init__(self, fields: dict[str, str], filename: str, num_bytes: int) -> None:
        self.fields, self.filename, self.num_bytes = fields, filename, num_bytes


async def receive_upload(
    content_type: str, body: AsyncIterator[bytes], target: Path, shelf: Shelf
) -> Uploaded:
    """Write the part ``file`` of a form to ``target``.

    Args:
        content_type: header of the request, with the boundary.
        body: the request's body.
        target: a file that is not there yet.
        shelf: of the tenant, which ``target`` is on.

    Raises:
        InvalidInput: the body is not such a form.
        FileTooLarge, QuotaExceeded: the file is too long; nothing more of it is read.
        StorageUnavailable: it cannot be written.
    """
    form = _Form()
    parser = _parser(content_type, form)
    file: BinaryIO = await on_disk(lambda: target.open("xb"))
    num_bytes = room_until = 0

    async def write() -> None:
        nonlocal num_bytes, room_until
        num_bytes += len(form.pending)
        if num_bytes > MAX_FILE_BYTES:
            raise FileTooLarge
        await on_disk(lambda: file.write(form.pending))
        form.pending.clear()
        # Others may come at the same time.
        if num_bytes >= room_until:
            room_until = num_bytes + CHECK_BYTES
            await on_disk(shelf.check_room)

    def finish() -> None:
        file.flush()
        os.fsync(file.fileno())
        shelf.check_room()

    try:
        async for chunk in body:
            try:
                parser.write(chunk)
            except FormParserError as error:
                raise InvalidInput("body", f"{_WANTED}: {error}"[:300]) from error
            if len(form.pending) >= WRITE_BYTES:
                await write()
        await write()
        await on_disk(finish)
    finally:
        await on_disk(file.close)
    if not form.ended or form.filename is None:
        raise InvalidInput("file" if form.ended else "body", f"the body {_WANTED}")
    return Uploaded(form.fields, form.filename, num_bytes)


def _parser(content_type: str, form: _Form) -> MultipartParser:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidInput("body", _WANTED)
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        return MultipartParser(boundary, callbacks)  # type: ignore[arg-type]  # the names are the callbacks' own
    except FormParserError as error:
        raise InvalidInput("body", f"{_WANTED}: {error}"[:300]) from error
