"""Forms as large as may be, for uploads: each is full of one thing that a parser of forms may stumble over."""

from collections.abc import Iterator

FILES = "/v1/files"
_EDGE = b"edge"
_PURPOSE = b'--edge\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
_FILE = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
_END = b"\r\n--edge--\r\n"
CONTENTS = (
    b"a",
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n-",
    b"\r\n--",
    b"\r\n--edg",
    b"\r\n--edge",
    b"-",
    b"\0",
    b"{}\n",
)


def large_forms(num_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Make requests with large forms."""
    for content in CONTENTS:
        yield (
            f"file of {content!r}",
            _request(_PURPOSE + _FILE + content * (num_bytes // len(content)) + _END),
        )
    field = b'--edge\r\nContent-Disposition: form-data; name="x"\r\n\r\na\r\n'
    yield "parts", _request(field * (num_bytes // len(field)) + _END[2:])
    header = b"--edge\r\n" + b"X: a\r\n" * (num_bytes // 6) + b"\r\n"
    yield "headers of a part", _request(header + _END)
    name = b'--edge\r\nContent-Disposition: form-data; name="' + b"a" * num_bytes + b'"\r\n\r\n'
    yield "name of a part", _request(name + _END)
    options = (
        b"--edge\r\nContent-Disposition: form-data" + b"; a=b" * (num_bytes // 5) + b"\r\n\r\n"
    )
    yield "options of a part", _request(options + _END)
    yield (
        "field",
        _request(
            b'--edge\r\nContent-Disposition: form-data; name="x"\r\n\r\n' + b"a" * num_bytes + _END
        ),
    )


def _request(form: bytes) -> bytes:
    head = (
        f"POST {FILES} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(form)}\r\n"
        "Content-Type: multipart/form-data; boundary="
    )
    return head.encode() + _EDGE + b"\r\n\r\n" + form
