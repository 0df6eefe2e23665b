"""HTTP/1.1 over a bare socket: a client's own cost must not count as the server's time."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

HOST = "127.0.0.1"


class Connection:
    """One kept connection; requests on it follow each other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connect to this machine."""
        return cls(*await asyncio.open_connection(HOST, port))

    @property
    def is_over(self) -> bool:
        """True once the other side has hung up, as it does with connections that rest for long."""
        return self._reader.at_eof()

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of an answer."""
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        return await self._answer()

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer that is not a stream."""
        self._writer.write(request(path, body))
        return await self._answer()

    async def answered(self, sent: bytes) -> int:
        """Send bytes of a request; gives the status of an answer that is not a stream."""
        self._writer.write(sent)
        status, _ = await self._answer()
        return status

    async def stream(self, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The events of a streamed answer as they come, ``data: `` cut off.

        Raises:
            RuntimeError: the answer is an error.
        """
        self.send(path, body)
        if (status := await self.begun()) != 200:
            raise RuntimeError(f"the stream was answered with {status}")
        while chunk := await self.chunk():
            for event in chunk.split(b"\n\n"):
                if event.startswith(b"data: "):
                    yield event[6:]

    def send(self, path: str, body: bytes) -> None:
        """Send a request whose answer is a stream; ``begun`` and ``chunk`` read it."""
        self._writer.write(request(path, body))

    async def begun(self) -> int:
        """The status of a streamed answer."""
        status, _ = await self._head()
        return status

    async def chunk(self) -> bytes:
        """The next part of a streamed answer; empty at its end."""
        size = int(await self._reader.readline(), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    def close(self) -> None:
        """Hang up."""
        self._writer.close()

    async def _answer(self) -> tuple[int, bytes]:
        status, headers = await self._head()
        return status, await self._body(headers)

    async def _head(self) -> tuple[int, bytes]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        return int(head[9:12]), head.lower()

    async def _body(self, head: bytes) -> bytes:
        length = head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0]
        return await self._reader.readexactly(int(length))


def request(path: str, body: bytes) -> bytes:
    """The bytes of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def encoded(body: Any) -> bytes:
    """A request body."""
    return json.dumps(body).encode()
