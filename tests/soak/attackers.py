"""Hostile clients in a process of their own: ``python -m tests.soak.attackers URL KEY SECONDS [HOST:PORT ...]``.

All attacks run at once and again and again until the time is over; what each saw is printed as JSON at the end. The
addresses are those of tensor and weights ports. The process gives way to all others, as what clients compute is
computed elsewhere.
"""

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx

from tests.soak.hostile import flood_bodies, flood_grammars, flood_trailers
from tests.soak.hostile_sockets import hostile_sockets

TEXTS, LABELS = 1024, 200
STREAMS = 400
WORDS = ("the", "a", "red", "blue", "house", "river", "cloud", "stone")
LAST_S = 5.0  # what is still open then is closed

Attack = Callable[[float], Awaitable[Counter[str]]]  # given how long it may take


async def flood_reads(url: str, key: str, within_s: float) -> Counter[str]:
    """Ask for 1,024 texts to be classified into 200 labels."""
    labels = [f"label {number} {WORDS[number % 8]}" for number in range(LABELS)]
    body: dict[str, object] = {
        "input": [_text(number) for number in range(TEXTS)],
        "labels": labels,
    }
    return await _post_all(url, key, "/v1/classify", [body], within_s)


async def flood_streams(url: str, key: str, within_s: float) -> Counter[str]:
    """Ask for 400 long answers at once."""
    bodies: list[dict[str, object]] = [
        {"prompt": _text(number), "max_tokens": 200, "ignore_eos": True}
        for number in range(STREAMS)
    ]
    return await _post_all(url, key, "/v1/completions", bodies, within_s)


def _text(number: int) -> str:
    words = (WORDS[(number * 7 + place * (number + 3)) % 8] for place in range(12))
    return f"{' '.join(words)} {number}"


async def _post_all(
    url: str, key: str, route: str, bodies: list[dict[str, object]], within_s: float
) -> Counter[str]:
    seen: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=len(bodies))
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(
        base_url=url, timeout=within_s, limits=limits, headers=headers
    ) as client:

        async def post(body: dict[str, object]) -> None:
            try:
                seen[f"{(await client.post(route, json=body)).status_code}"] += 1
            except httpx.HTTPError as error:
                seen[type(error).__name__] += 1

        await asyncio.gather(*map(post, bodies))
    return seen


async def attack(url: str, key: str, seconds: float, data: list[str]) -> dict[str, Counter[str]]:
    """Do all of it for so long; returns what each attack saw."""
    attacks: dict[str, Attack] = {
        "reads": lambda left_s: flood_reads(url, key, left_s),
        "streams": lambda left_s: flood_streams(url, key, left_s),
        "bodies": lambda left_s: flood_bodies(url, key, within_s=left_s),
        "trailers": lambda left_s: flood_trailers(url, key, within_s=left_s),
        "grammars": lambda left_s: flood_grammars(url, key, within_s=left_s),
    }
    for address in data:
        host, _, port = address.rpartition(":")
        attacks[f"sockets {address}"] = lambda left_s, host=host, port=port: hostile_sockets(  # type: ignore[misc]
            host, int(port), left_s
        )
    seen: dict[str, Counter[str]] = {name: Counter() for name in attacks}
    end_s = time.monotonic() + seconds

    async def repeat(name: str) -> None:
        while (left_s := end_s - time.monotonic()) > 1:
            seen[name] += await attacks[name](left_s)

    async with asyncio.timeout(seconds + LAST_S), asyncio.TaskGroup() as group:
        for name in attacks:
            group.create_task(repeat(name))
    return seen


def main() -> None:
    """Attack as the arguments say."""
    os.nice(19)
    url, key, seconds, *data = sys.argv[1:]
    print(json.dumps(asyncio.run(attack(url, key, float(seconds), data))))


if __name__ == "__main__":
    main()
