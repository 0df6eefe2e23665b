"""Challenge and response with the cluster secret, before UCX is involved.

Over a plain TCP connection: HELLO (the dialler's id, role and nonce), CHALLENGE (the same of the
listener), PROOF (the dialler's HMAC over both), WELCOME (the listener's). The two HMACs carry
different labels, so neither can be reflected, and both nonces are fresh, so neither can be replayed.
Until PROOF is verified the listener reads at most 1 KiB at a time.

HELLO is sealed with the secret as well, or the listener refuses it. A seal can be copied, so it proves nothing, but
strangers have none: a crowded listener prefers connections with a seal.
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import msgspec

from moesaic.errors import FrameError, MoesaicError, PeerLost
from moesaic.transport.failure import error_of, failure_frame
from moesaic.transport.frame import HEADER_BYTES, Frame, FrameKind, FrameLimits, payload_bytes

NONCE_BYTES = 32
_MAC_BYTES = 32
_STRANGER = FrameLimits(max_rows=0, max_cols=0, max_bytes=1024)  # until the peer has proved itself
_ACQUAINTED = FrameLimits(max_rows=0, max_cols=0, max_bytes=1 << 16)

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Introduction(msgspec.Struct, frozen=True):
    """The body of HELLO and CHALLENGE."""

    worker_id: _Name
    role: _Name
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    seal: Annotated[bytes, msgspec.Meta(max_length=_MAC_BYTES)] = b""  # HELLO's, over the rest


@dataclass(frozen=True)
class Session:
    """The shared knowledge of both ends after the handshake."""

    peer: str
    key: bytes

    def tag(self, sender: str) -> int:
        """Derive the 64-bit tag on all messages of ``sender`` ("dialler" or "listener") in this connection."""
        return int.from_bytes(_mac(self.key, b"tag of " + sender.encode())[:8], "little")

    def token(self, purpose: str) -> bytes:
        """Derive 32 bytes that only the two ends of this session know."""
        return _mac(self.key, b"token for " + purpose.encode())

    async def send(self, sock: socket.socket, kind: FrameKind, body: bytes) -> None:
        """Send a body with a proof of its sender."""
        await _send(sock, kind, _mac(self.key, bytes([kind]) + body) + body)

    async def receive(self, sock: socket.socket, kind: FrameKind) -> bytes:
        """Receive a body that the other end sent with ``send``.

        Raises:
            FrameError: it is not of ``kind``, damaged, or not the peer's.
            MoesaicError: the other end has refused, with this reason.
        """
        sealed = await _receive(sock, kind, _ACQUAINTED)
        mac, body = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self.key, bytes([kind]) + body)):
            raise FrameError("body", "was not written by the authenticated peer")
        return body


async def dial(sock: socket.socket, secret: bytes, worker_id: str, role: str, peer: str) -> Session:
    """Authenticate as the dialling end, and the listener as ``peer``.

    Raises:
        PeerLost: the secrets differ, or another worker answers.
        FrameError: the listener does not speak this protocol.
    """
    hello = introduce(worker_id, role, secret)
    await _send(sock, FrameKind.HELLO, hello)
    challenge = await _hear(sock, FrameKind.CHALLENGE, peer)
    found = _introduction(challenge).worker_id
    if found != peer:
        raise PeerLost(peer, f"the worker at this address is {found!r}")
    transcript = _transcript(hello, challenge)
    await _send(sock, FrameKind.PROOF, _mac(secret, b"dialler" + transcript))
    welcome = await _hear(sock, FrameKind.WELCOME, peer)
    if not hmac.compare_digest(welcome, _mac(secret, b"listener" + transcript)):
        raise PeerLost(peer, "auth failed: it does not know the cluster secret")
    return Session(peer, _mac(secret, b"session" + transcript))


async def accept(
    sock: socket.socket,
    secret: bytes,
    worker_id: str,
    role: str,
    on_seal: Callable[[], None] = lambda: None,
) -> Session:
    """Authenticate as the listening end; call ``on_seal`` once the dialler's HELLO has proved sealed.

    Raises:
        PeerLost: the other end does not know the secret, and has been told.
        FrameError: it does not speak this protocol.
    """
    hello = await _receive(sock, FrameKind.HELLO, _STRANGER)
    introduction = _introduction(hello)
    peer = introduction.worker_id
    if not hmac.compare_digest(introduction.seal, _seal(introduction, secret)):
        raise await _refused(sock, worker_id, peer)
    on_seal()
    challenge = introduce(worker_id, role)
    await _send(sock, FrameKind.CHALLENGE, challenge)
    transcript = _transcript(hello, challenge)
    proof = await _receive(sock, FrameKind.PROOF, _STRANGER)
    if not hmac.compare_digest(proof, _mac(secret, b"dialler" + transcript)):
        raise await _refused(sock, worker_id, peer)
    await _send(sock, FrameKind.WELCOME, _mac(secret, b"listener" + transcript))
    return Session(peer, _mac(secret, b"session" + transcript))


async def refuse(sock: socket.socket, error: MoesaicError) -> None:
    """Send the other end the reason for closing the connection."""
    message = failure_frame(Frame(kind=FrameKind.ERROR), error).encode()
    await asyncio.get_running_loop().sock_sendall(sock, message)


async def _refused(sock: socket.socket, worker_id: str, peer: str) -> PeerLost:
    await refuse(sock, PeerLost(worker_id, "auth failed: the cluster secrets differ"))
    return PeerLost(peer, "auth failed: it does not know the cluster secret")


def introduce(worker_id: str, role: str, secret: bytes | None = None) -> bytes:
    """Encode an introduction with a fresh nonce, sealed if ``secret`` is given."""
    introduction = Introduction(worker_id, role, secrets.token_bytes(NONCE_BYTES))
    if secret is not None:
        introduction = msgspec.structs.replace(introduction, seal=_seal(introduction, secret))
    return msgspec.msgpack.encode(introduction)


def _seal(introduction: Introduction, secret: bytes) -> bytes:
    bare = msgspec.structs.replace(introduction, seal=b"")
    return _mac(secret, b"hello" + msgspec.msgpack.encode(bare))


def _introduction(body: bytes) -> Introduction:
    try:
        return msgspec.msgpack.decode(body, type=Introduction)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise FrameError("body", f"is not an introduction: {error}") from error


def _transcript(hello: bytes, challenge: bytes) -> bytes:
    return hashlib.sha256(hello).digest() + hashlib.sha256(challenge).digest()


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, b"moesaic transport 1 " + text, "sha256")


async def _send(sock: socket.socket, kind: FrameKind, body: bytes) -> None:
    message = Frame(kind=kind, body=body).encode()
    await asyncio.get_running_loop().sock_sendall(sock, message)


async def _hear(sock: socket.socket, kind: FrameKind, peer: str) -> bytes:
    """Receive what the listener says, or raise its refusal as that of ``peer``."""
    try:
        return await _receive(sock, kind, _STRANGER)
    except PeerLost as refusal:
        raise PeerLost(peer, refusal.cause) from refusal


async def _receive(sock: socket.socket, kind: FrameKind, limits: FrameLimits) -> bytes:
    header = await _read(sock, HEADER_BYTES)
    frame = Frame.decode(header + await _read(sock, payload_bytes(header, limits)), limits)
    if frame.kind is FrameKind.ERROR:
        raise error_of(frame)
    if frame.kind is not kind:
        raise FrameError("kind", f"expected {kind.name}, got {frame.kind.name}")
    return frame.body


async def _read(sock: socket.socket, nbytes: int) -> bytearray:
    """Read exactly ``nbytes``; raise ``ConnectionError`` if the other end stops before."""
    received = bytearray()
    while len(received) < nbytes:
        part = await asyncio.get_running_loop().sock_recv(sock, nbytes - len(received))
        if not part:
            raise ConnectionResetError("closed by the other end")
        received += part
    return received


class Handshakes:
    """Counts the handshakes of one network that are under way. Lives on one event loop."""

    def __init__(self) -> None:
        self._number, self._none = 0, asyncio.Event()
        self._none.set()

    @property
    def under_way(self) -> bool:
        """True if there is one."""
        return self._number > 0

    async def ended(self) -> None:
        """Wait until there is none."""
        await self._none.wait()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a handshake while its body runs."""
        self._number += 1
        self._none.clear()
        try:
            yield
        finally:
            self._number -= 1
            if not self._number:
                self._none.set()
