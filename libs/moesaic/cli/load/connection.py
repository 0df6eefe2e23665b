"""HTTP/1.1 over a bare socket: a client's own cost must not count as the server's time."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

HOST = "127.0.0.1"
_PART = 1 << 16  # largest part of an answer without a length, in bytes


class Connection:
    """One kept connection; requests on it follow each other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        # Bytes of the answer that are to come; None: they come in chunks, below 0: until the other side hangs up.
        self._left: int | None = 0
        self._is_last = False  # the other side hangs up behind this answer

    @classmethod
    async def open(
        cls, port: int, host: str = HOST, tls: ssl.SSLContext | None = None
    ) -> "Connection":
        """Connect to a machine, this one by default."""
        return cls(*await asyncio.open_connection(host, port, ssl=tls))

    @property
    def is_over(self) -> bool:
        """True once the other side has hung up, as it does with connections that rest for long."""
        return self._is_last or self._reader.at_eof()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of an answer."""
        return await self.answer(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer that is not a stream."""
        return await self.answer(request(path, body))

    async def answer(self, sent: bytes) -> tuple[int, bytes]:
        """Send the bytes of a request; status and body of an answer that is not a stream."""
        return await self.ask(sent), await self.part()

    async def stream(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The events of a streamed answer as they come, ``data: `` cut off.

        Raises:
            RuntimeError: the answer is an error.
        """
        if (status := await self.ask(request(path, body))) != 200:
            raise RuntimeError(f"the stream was answered with {status}")
        while part := await self.part():
            for event in part.split(b"\n\n"):
                if event.startswith(b"data: "):
                    yield event[6:]

    async def ask(self, sent: bytes) -> int:
        """Send the bytes of a request, and return the status; ``part`` reads the answer, streamed or not."""
        self.send(sent)
        return await self.begun()

    def send(self, sent: bytes) -> None:
        """Send the bytes of a request; ``begun`` and ``part`` read its answer."""
        self._writer.write(sent)

    async def begun(self) -> int:
        """Wait for the status of an answer."""
        status, head = await self._head()
        lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
        fields = {name: value.strip() for name, _, value in lines}
        # Servers of HTTP/1.0 hang up unless they say otherwise.
        is_old, connection = head.startswith(b"http/1.0"), fields.get(b"connection")
        self._is_last = connection == b"close" or (is_old and connection != b"keep-alive")
        self._left = int(fields.get(b"content-length", -1))
        if fields.get(b"transfer-encoding") == b"chunked":
            self._left = None
        return status

    async def part(self) -> bytes:
        """Wait for the next part of an answer; empty at its end.

        Raises:
            EOFError: the other side has hung up.
        """
        if self._left is not None and self._left < 0:
            return await self._reader.read(_PART)
        if self._left is not None:
            size, self._left = self._left, 0
            return await self._reader.readexactly(size)
        if not (line := await self._reader.readline()):
            raise EOFError("the connection ended within a stream")
        return (await self._reader.readexactly(int(line.partition(b";")[0], 16) + 2))[:-2]

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    async def _head(self) -> tuple[int, bytes]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        return int(head[9:12]), head.lower()


def request(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a POST request."""
    fields = {"Host": HOST, "Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{name}: {value}\r\n" for name, value in {**fields, **(headers or {})}.items()]
    return f"POST {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode() + body


def encoded(body: Any) -> bytes:
    """A request body."""
    return json.dumps(body).encode()
