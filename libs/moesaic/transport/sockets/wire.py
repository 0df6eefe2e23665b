"""The wire of machines without C functions: the same records as ``exchange/stream.c``, by Python."""

import asyncio
import socket
from collections import deque

import structlog

from moesaic.transport.frame import Message
from moesaic.transport.rings.channel import Channel
from moesaic.transport.sockets.channel import cause_of_end
from moesaic.transport.sockets.control import keep_alive
from moesaic.transport.wire import NOBODY, Parcels, Receiver

log = structlog.get_logger()

_RECORD = 64  # bytes of a record's head, and its alignment
_AT_ONCE = 1 << 18  # bytes


class SocketWire:
    """A ``Wire`` over the connection of the handshake."""

    channel: Channel | None = None
    parcels: Parcels | None = None
    receiver: Receiver

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        """Take over ``sock``; a message of more than ``max_bytes`` ends the connection."""
        self._sock, self._max_bytes = sock, max_bytes
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._waiting: deque[memoryview] = deque()
        keep_alive(sock)
        self._loop.add_reader(sock, self._read)

    def send(self, message: Message) -> None:
        """See ``Wire.send``."""
        if self._sock.fileno() < 0:
            return
        head = len(message).to_bytes(8, "little") + bytes(_RECORD - 8)
        self._waiting.append(memoryview(head + message + bytes(-len(message) % _RECORD)))
        if len(self._waiting) == 1:
            self._write()

    def close(self) -> None:
        """See ``Wire.close``."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
            self._waiting.clear()
            self.receiver = NOBODY

    def _write(self) -> None:
        try:
            while self._waiting:
                record = self._waiting[0]
                sent = self._sock.send(record)
                if sent < len(record):
                    self._waiting[0] = record[sent:]
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._write)
            return
        except OSError:  # what came before is read first
            self._waiting.clear()
        self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            came = self._sock.recv(_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            came = b""
        if not came:
            self._lose(cause_of_end(self._sock))
            return
        self._received += came
        begin = 0
        while len(self._received) - begin >= _RECORD and self._sock.fileno() >= 0:
            size = int.from_bytes(self._received[begin : begin + 8], "little")
            if not 0 < size <= self._max_bytes:
                self._lose(f"a message of {size} bytes is too long")
                return
            start = begin + _RECORD
            end = start + size + -size % _RECORD
            if len(self._received) < end:
                break
            begin = end
            try:
                self.receiver.on_message(self._received[start : start + size])
            except Exception:  # one message's fault must not stop the others
                log.exception("message.failed")
        del self._received[:begin]

    def _lose(self, cause: str) -> None:
        receiver = self.receiver
        self.close()
        receiver.on_lost(cause)
