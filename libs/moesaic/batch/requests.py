"""Lines of a batch's input: ``{"custom_id", "method": "POST", "url", "body"}``, one request each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import msgspec

MAX_LINES = 50_000  # of one batch of the REST API
MAX_FILE_BYTES = 200 << 20  # likewise
MAX_CUSTOM_ID_CHARS = 512
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NULL = msgspec.Raw(b"null")


@dataclass(frozen=True)
class BatchRequest:
    """One request of a batch.

    Attributes:
        number: number of its line, from 1.
        custom_id: the caller's name for it, unique in the input.
        url: path of the route, such as ``/v1/chat/completions``.
        body: the JSON object to post there, as it was written.
    """

    number: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True)
class BadLine:
    """A line without a request, or with one that cannot be part of this batch.

    Attributes:
        number: number of the line, from 1.
        custom_id: None if it could not be read.
        code: stable code, for programs.
        message: the correction to make.
        param: the field to correct.
    """

    number: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


Line = BatchRequest | BadLine


class _Fields(msgspec.Struct):
    """Fields of a line that count. Others are not decoded, which saves time and memory."""

    custom_id: msgspec.Raw = _NULL
    method: msgspec.Raw = _NULL
    url: msgspec.Raw = _NULL
    body: msgspec.Raw = _NULL


class _Body(msgspec.Struct):
    """Fields of a body that count here; the rest is the route's business."""

    stream: msgspec.Raw = _NULL


_FIELDS, _BODY = msgspec.json.Decoder(_Fields), msgspec.json.Decoder(_Body)
_TEXT = msgspec.json.Decoder(str)


def read_requests(
    lines: BinaryIO,
    max_line_bytes: int,
    endpoint: str | None = None,
    max_lines: int | None = None,
) -> Iterator[Line]:
    """Read every line in order, one at a time; blank ones are passed over.

    Args:
        lines: the input, from its beginning.
        max_line_bytes: size of the longest good line; a longer one is never held in memory.
        endpoint: the one ``url`` that all requests must have; None accepts any path.
        max_lines: most lines, blank ones included; the next line is a bad one, and the rest is not
            read.
    """
    seen: set[str] = set()
    number = 0
    while line := lines.readline(max_line_bytes + 1):
        number += 1
        if max_lines is not None and number > max_lines:
            message = f"there may be at most {max_lines} lines, blank ones included"
            yield BadLine(number, None, "too_many_lines", message)
            return
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if len(line) > max_line_bytes and not line.endswith(b"\n"):
            _skip_line(lines, max_line_bytes)
            message = f"a line may have at most {max_line_bytes} bytes"
            yield BadLine(number, None, "line_too_long", message)
            continue
        if not line.strip():
            continue
        read = parse_line(line, number, endpoint)
        if read.custom_id is not None:
            if read.custom_id in seen:
                message = f"custom_id {read.custom_id[:100]!r} was used on an earlier line"
                read = BadLine(number, read.custom_id, "duplicate_custom_id", message, "custom_id")
            seen.add(read.custom_id)  # type: ignore[arg-type]  # both kinds keep the one they had
        yield read


def parse_line(line: bytes, number: int, endpoint: str | None = None) -> Line:
    """Read one line by itself; see ``read_requests``."""
    try:
        fields = _FIELDS.decode(line)
        custom_id, method, url = map(_text, (fields.custom_id, fields.method, fields.url))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"not a JSON object: {str(error)[:200]}"
        return BadLine(number, None, "invalid_json_line", message)
    if custom_id is None or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        needed = f"a string of 1 to {MAX_CUSTOM_ID_CHARS} characters is needed"
        return BadLine(number, None, _fault(fields.custom_id, "custom_id"), needed, "custom_id")
    body = bytes(fields.body)
    if method != "POST":
        fault = _fault(fields.method, "method"), "method", 'must be "POST"'
    elif url is None or not _is_path(url):
        fault = _fault(fields.url, "url"), "url", "must be a path such as /v1/chat/completions"
    elif endpoint is not None and url != endpoint:
        fault = "mismatched_endpoint", "url", f"must be the batch's endpoint, {endpoint}"
    elif not body.startswith(b"{"):
        fault = _fault(fields.body, "body"), "body", "must be a JSON object"
    elif bytes(_BODY.decode(body).stream) not in (b"false", b"null"):
        message = "must be false: the answers of a batch are not streamed"
        fault = "unsupported_parameter", "body.stream", message
    else:
        return BatchRequest(number, custom_id, url, body)
    code, param, message = fault
    return BadLine(number, custom_id, code, message, param)


def _text(value: msgspec.Raw) -> str | None:
    try:
        return _TEXT.decode(value)
    except msgspec.ValidationError:
        return None


def _fault(value: msgspec.Raw, field: str) -> str:
    return f"invalid_{field}" if bytes(value) != b"null" else "missing_required_parameter"


def _is_path(url: str) -> bool:
    """Tell a path on the asked server from everything else, such as another server's address."""
    return url.startswith("/") and not url.startswith("//") and url.isascii() and url.isprintable()


def _skip_line(lines: BinaryIO, chunk_bytes: int) -> None:
    while (rest := lines.readline(chunk_bytes)) and not rest.endswith(b"\n"):
        continue
