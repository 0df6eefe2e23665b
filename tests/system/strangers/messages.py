"""First messages of strangers, for every protocol that a suite listens for."""

import random
import struct
from collections.abc import Callable, Sequence

from moesaic.cluster.security.tokens import Tokens
from moesaic.transport.frame import Frame, FrameKind
from moesaic.transport.ucx import handshake

MOST_BYTES = 1 << 20  # of one message
_METHODS = (
    "/grpc.health.v1.Health/Check",
    "/moesaic.v1.AdminService/Shutdown",
    "/moesaic.v1.AttentionService/Execute",
    "/moesaic.v1.RankStoreService/Set",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/no.such.Service/Method",
)


def http(draw: random.Random) -> bytes:
    """A request to an HTTP server."""
    path = draw.choice(["/metrics", "/v1/models", "/v1/completions", "/healthz", "/" + "a" * 9000])
    body = draw.choice([b"", b"{}", b'{"model": "demo", "prompt": 1}', b"[" * 2000, b"\xff" * 100])
    length = draw.choice([len(body), 0, -1, 1 << 40, "many"])
    lines = [
        f"{draw.choice(['GET', 'POST', 'HEAD', 'PRI', 'get'])} {path} HTTP/{draw.choice(['1.1', '1.0', '2.0', '9'])}",
        f"Host: {draw.choice(['127.0.0.1', 'example.org', ''])}",
        f"Content-Length: {length}",
        draw.choice(
            ["Transfer-Encoding: chunked", "Expect: 100-continue", "X-A: " + "b" * 70000, "A"]
        ),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def grpc(draw: random.Random) -> bytes:
    """A call of HTTP/2 without a token, with a foreign one, or with one for somebody else."""
    secret = draw.choice([b"a guess", b""])
    token = Tokens(secret or b"-").current("admin", draw.choice(["*", "somebody-else"]))
    path = draw.choice(_METHODS).encode()
    if draw.random() < 0.2:
        path = b"/" + draw.randbytes(draw.randrange(1, 100))
    message = draw.randbytes(draw.choice([0, 5, 300]))
    size = draw.choice([len(message), 0, 1 << 31, len(message) + 1])
    data = struct.pack(">BI", draw.choice([0, 1, 7]), size) + message
    more = b""
    if draw.random() < 0.3:  # frames of any kind, and of streams that nobody opened
        more = _frame(draw.randrange(12), draw.randrange(256), draw.randrange(9), message)
    return call_of(path, data, f"Bearer {token}" if secret else "") + more


def call_of(path: bytes, data: bytes, authorization: str = "") -> bytes:
    """The bytes of a call by HTTP/2: preface, settings, headers and data."""
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path),
        (b":authority", b"127.0.0.1"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    if authorization:
        headers.append((b"authorization", authorization.encode()))
    block = b"".join(_header(name, value) for name, value in headers)
    frames = [_frame(4, 0, 0, b""), _frame(1, 4, 1, block), _frame(0, 1, 1, data)]
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(frames)


def tensors(draw: random.Random) -> bytes:
    """A frame of the handshake, whole and alone, or in a wrong order."""
    name = draw.choice(["attention-0", "expert-0", "x" * 64])
    secret = draw.choice([None, b"a guess"])
    hello = handshake.introduce(name, "attention", secret)
    kinds = [FrameKind.HELLO, draw.choice(list(FrameKind))]
    bodies = [hello, draw.choice([hello, bytes(32), draw.randbytes(900), b""])]
    frames = [bytes(Frame(kind=k, body=b).encode()) for k, b in zip(kinds, bodies, strict=True)]
    return b"".join(frames[draw.randrange(2) :])


def numbers(draw: random.Random) -> bytes:
    """What gloo's ends send each other first: a number."""
    return struct.pack("<q", draw.choice([0, 1, -1, 1 << 40])) * draw.randrange(1, 5)


def resp(draw: random.Random) -> bytes:
    """The beginning of a command to Redis, none that does something."""
    return draw.choice(
        [b"*1\r\n$4\r\nPIN", b"*1000000000\r\n", b"$-7\r\n", b"PING", b"*2\r\n$99999999999\r\n"]
    )


OF_KIND: dict[str, Callable[[random.Random], bytes]] = {
    "REST": http,
    "metrics": http,
    "gRPC": grpc,
    "meeting of ranks": grpc,
    "tensors": tensors,
    "ranks": numbers,
    "Redis": resp,
}


def spoilt(draw: random.Random, message: bytes, earlier: Sequence[bytes]) -> bytes:
    """A message as it is, cut, changed, repeated, far too long, out of order, or nothing but noise."""
    if not message:
        return draw.randbytes(40)
    way = draw.randrange(8)
    if way == 0:
        return message[: draw.randrange(len(message))]
    if way == 1:
        changed = bytearray(message)
        for _ in range(draw.randrange(1, 9)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed)
    if way == 2:
        return (message * (MOST_BYTES // len(message)))[:MOST_BYTES]
    if way == 3:
        return draw.randbytes(draw.choice([1, 40, 5000]))
    if way == 4 and earlier:
        return draw.choice(earlier) + message
    if way == 5:
        return message + bytes(draw.choice([1, 8, MOST_BYTES]))
    return message


def _header(name: bytes, value: bytes) -> bytes:
    """A field of HPACK, written out; of a longer value than 126 bytes the rest is cut."""
    return b"\x00" + b"".join(bytes([len(part)]) + part for part in (name, value[:126]))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )
