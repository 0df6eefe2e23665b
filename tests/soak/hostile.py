"""Clients that mean harm, or have a bug: bodies, trailers and grammars that take long to look at.

Each function takes the gateway's URL and an API key (empty where none is needed), sends a bounded number of requests,
ends within ``within_s``, and gives what came back, by status or by how the connection ended. None of them expects to be
served; whoever calls them beside other traffic looks at what becomes of that.

    await asyncio.gather(flood_bodies(url, key), flood_trailers(url, key), flood_grammars(url, key))
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping

import httpx

WITHIN_S = 60.0


def _json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


# Route and body of each; made when asked for, since together they are 60 MB.
BODIES: Mapping[str, Callable[[], tuple[str, bytes]]] = {
    "one long word": lambda: ("/v1/completions", _json(prompt="a" * 4_000_000)),
    "many words": lambda: ("/v1/completions", _json(prompt="word " * 790_000)),
    "a chat of many words": lambda: (
        "/v1/chat/completions",
        _json(messages=_user("word " * 790_000)),
    ),
    "a chat of control tokens": lambda: (
        "/v1/chat/completions",
        _json(messages=_user("<|im_end|>" * 400_000)),
    ),
    "many messages": lambda: (
        "/v1/chat/completions",
        _json(messages=_user("a") * 100_000),
    ),
    "empty lists in an unknown field": lambda: (
        "/v1/completions",
        b'{"prompt": "a", "unknown": [' + b"[]," * 1_300_000 + b"[]]}",
    ),
    "many unknown fields": lambda: (
        "/v1/completions",
        _json(prompt="a", **{f"x{i}": 1 for i in range(250_000)}),
    ),
    "wrong token ids": lambda: ("/detokenize", _json(tokens=["a"] * 500_000)),
    "tokenize": lambda: ("/tokenize", _json(prompt="word " * 790_000)),
    "tokenize, with strings": lambda: (
        "/tokenize",
        _json(prompt="word " * 100_000, return_token_strs=True),
    ),
    "detokenize": lambda: ("/detokenize", _json(tokens=[100] * 500_000)),
    "detokenize more": lambda: ("/detokenize", _json(tokens=[7] * 1_300_000)),
    "a long label": lambda: (
        "/v1/classify",
        _json(input="x", labels=["label " * 330_000, "b"]),
    ),
    "a long text to classify": lambda: (
        "/v1/classify",
        _json(input="text " * 700_000, labels=["a", "b"], method="multi"),
    ),
    "documents": lambda: (
        "/v1/rerank",
        _json(query="a", documents=["document " * 400] * 100),
    ),
    "nested lists": lambda: ("/v1/completions", b'{"prompt": ' + b"[" * 2_000_000),
    "a long number": lambda: ("/v1/completions", b'{"seed": ' + b"7" * 4_000_000 + b"}"),
    "escapes": lambda: ("/v1/completions", b'{"prompt": "' + b'\\"' * 2_000_000 + b'"}'),
}


async def flood_bodies(
    url: str, key: str = "", times: int = 1, within_s: float = WITHIN_S
) -> Counter[str]:
    """Send every body of ``BODIES``, two at a time."""
    seen: Counter[str] = Counter()
    two = asyncio.Semaphore(2)

    async def post(client: httpx.AsyncClient, name: str) -> None:
        async with two:
            route, body = await asyncio.to_thread(BODIES[name])
            headers = {"content-type": "application/json", **_authorization(key)}
            try:
                answer = await client.post(route, content=body, headers=headers)
                seen[f"{name}: {answer.status_code}"] += 1
            except httpx.HTTPError as error:
                seen[f"{name}: {type(error).__name__}"] += 1

    async with httpx.AsyncClient(base_url=url, timeout=within_s) as client:
        await _bounded((post(client, name) for _ in range(times) for name in BODIES), within_s)
    return seen


# What is sent behind the head of a chunked request, and then again and again.
FRAMING: Mapping[str, tuple[bytes, bytes]] = {
    "one trailer": (b"0\r\nx-trailer: ", b"a" * 65536),
    "trailers": (b"0\r\n", b"name: value\r\n" * 5000),
    "chunk extension": (b"1;extension=", b"a" * 65536),
    "smallest chunks": (b"", b"1\r\na\r\n" * 10_000),
    "requests": (b"0\r\n\r\n", b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000),
    "headers": (b"0\r\n\r\nGET /livez HTTP/1.1\r\n", b"a: b\r\n" * 10_000),
}
MAX_SENT_BYTES = 300_000_000


async def flood_trailers(
    url: str, key: str = "", times: int = 1, within_s: float = WITHIN_S
) -> Counter[str]:
    """Send what never ends around a body, on bare sockets, at most ``MAX_SENT_BYTES`` each; counts the bytes, in MB,
    that were taken of each."""
    seen: Counter[str] = Counter()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{_header(key)}transfer-encoding: chunked\r\n\r\n"

    async def send(name: str) -> None:
        first, again = FRAMING[name]
        host, _, port = url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        sent = 0
        try:
            writer.write(head.encode() + first)
            while sent < MAX_SENT_BYTES:
                writer.write(again)
                await writer.drain()
                sent += len(again)
            seen[f"{name}: all was taken"] += 1
        except OSError:
            seen[f"{name}: hung up on"] += 1
        finally:
            seen[f"{name}: MB"] += sent // 1_000_000
            writer.close()

    await _bounded((send(name) for _ in range(times) for name in FRAMING), within_s)
    return seen


_NUM_LEXEMES = 600
GRAMMARS: Mapping[str, dict[str, object]] = {
    "lexemes": {
        "guided_grammar": "start: ("
        + " | ".join(f"T{i}" for i in range(_NUM_LEXEMES))
        + ")+\n"
        + "\n".join(f"T{i}: /[^{chr(97 + i % 26)}]*[a-z]{{0,{i}}}/" for i in range(_NUM_LEXEMES))
    },
    "a chain of rules": {
        "guided_grammar": "start: r0\n"
        + "\n".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1}' for i in range(5000))
        + '\nr5000: "c"'
    },
    "nested groups": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
    "a schema of patterns": {
        "guided_json": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,20}}{i}$"} for i in range(1000)
            },
        }
    },
    "a schema that ends nowhere": {
        "guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    },
}


async def flood_grammars(
    url: str, key: str = "", times: int = 1, within_s: float = WITHIN_S
) -> Counter[str]:
    """Ask for one token that fits each grammar of ``GRAMMARS``, all at once; those of one name differ, so that none
    is compiled already."""
    seen: Counter[str] = Counter()

    async def ask(client: httpx.AsyncClient, name: str, number: int) -> None:
        body = {"prompt": "a", "max_tokens": 1, **GRAMMARS[name]}
        if "guided_grammar" in body:
            body["guided_grammar"] = f"{body['guided_grammar']}\n// {number}"
        try:
            answer = await client.post("/v1/completions", json=body, headers=_authorization(key))
            seen[f"{name}: {answer.status_code}"] += 1
        except httpx.HTTPError as error:
            seen[f"{name}: {type(error).__name__}"] += 1

    async with httpx.AsyncClient(base_url=url, timeout=within_s) as client:
        asked = (ask(client, name, number) for number in range(times) for name in GRAMMARS)
        await _bounded(asked, within_s)
    return seen


async def _bounded(work: Iterable[Coroutine[object, object, None]], within_s: float) -> None:
    tasks = [asyncio.create_task(one) for one in work]
    _, pending = await asyncio.wait(tasks, timeout=within_s)
    for task in pending:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _header(key: str) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in _authorization(key).items())
