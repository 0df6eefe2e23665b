"""Bodies of requests as they come in: neither too long nor too slow, and decompressed where they are compressed."""

import asyncio
import zlib

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from moesaic.errors import InvalidInput

BODY_S = 30.0  # longest pause within a request's body
PIECE_BYTES = 1 << 16  # decompressed at once, between which others have the event loop
CODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Compressions of bodies, by name, with the format that zlib knows each as."""


def too_large(max_bytes: int) -> str:
    """Say how many bytes a body may have."""
    return f"the body must be at most {max_bytes} bytes"


class BoundedBody:
    """Receives the body of a request, neither too long nor too slow."""

    def __init__(self, receive: Receive, max_bytes: int) -> None:
        self._receive, self._left, self._max_bytes = receive, max_bytes, max_bytes
        self._complete = False

    async def __call__(self) -> Message:
        """Receive the next piece.

        Raises:
            HTTPException: it does not come in time, or the body is too long.
        """
        # Only the client's leaving can come now.
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_S):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the rest of the body did not arrive within {BODY_S:g} s"
            ) from None
        if message["type"] == "http.request":
            self._complete = not message.get("more_body", False)
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise HTTPException(413, too_large(self._max_bytes))
        return message


class Inflated:
    """Receives a compressed body as what was compressed. No more of it is decompressed than a body may have."""

    def __init__(self, receive: Receive, coding: str, max_bytes: int) -> None:
        """Decompress what ``receive`` gives; ``coding`` is one of ``CODINGS``."""
        self._receive, self._coding = receive, coding
        self._left, self._max_bytes = max_bytes, max_bytes
        self._zlib = zlib.decompressobj(CODINGS[coding])
        self._has_more = self._is_last = False

    async def __call__(self) -> Message:
        """Receive the next piece.

        Raises:
            HTTPException: the body is too long, compressed or not, or too slow.
            InvalidInput: it was not compressed so.
        """
        if self._has_more:
            await asyncio.sleep(0)
            return self._next(self._zlib.unconsumed_tail)
        message = await self._receive()
        # Only the client's leaving can come behind the last.
        if message["type"] != "http.request" or self._is_last:
            return message
        self._is_last = not message.get("more_body", False)
        return self._next(message.get("body", b""))

    def _next(self, compressed: bytes) -> Message:
        try:
            piece = self._zlib.decompress(compressed, PIECE_BYTES)
        except zlib.error:
            raise InvalidInput("body", f"is not valid {self._coding}") from None
        self._left -= len(piece)
        if self._left < 0:
            raise HTTPException(413, too_large(self._max_bytes))
        if self._zlib.unused_data:
            raise InvalidInput("body", f"goes on behind the end of its {self._coding} data")
        # A full piece may leave some within the decompressor.
        self._has_more = not self._zlib.eof and (
            bool(self._zlib.unconsumed_tail) or len(piece) == PIECE_BYTES
        )
        is_end = self._is_last and not self._has_more
        if is_end and not self._zlib.eof:
            raise InvalidInput("body", f"ends before the end of its {self._coding} data")
        return {"type": "http.request", "body": piece, "more_body": not is_end}
