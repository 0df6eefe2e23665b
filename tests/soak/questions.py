"""The questions of a soak, and the answers of a suite that nobody disturbs."""

import gzip
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.suites import CLINC_DOMAIN, ROOT

MIN_MARGIN = (
    1e-3  # between the two likeliest tokens: what is closer may turn with the shape of a batch
)
TEXT = ROOT / "models/training/data/text/sherlock_holmes.txt.gz"
COMPLETIONS, CHAT, CLASSIFY = "/v1/completions", "/v1/chat/completions", "/v1/classify"
BAD: list[tuple[str, Any, int]] = [  # route, body, status
    (COMPLETIONS, b'{"prompt": ', 400),
    (COMPLETIONS, {"prompt": []}, 400),
    (COMPLETIONS, {"prompt": "a", "temperature": 9}, 400),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 100_000}, 400),
    (COMPLETIONS, {"prompt": [1 << 31]}, 400),
    (COMPLETIONS, {"prompt": "a", "guided_json": {"type": "nothing"}}, 400),
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404),
    (CHAT, {"messages": []}, 400),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}, 400),
    (CLASSIFY, {"input": "a", "labels": ["one"]}, 400),
    ("/v1/nothing", {}, 404),
]


@dataclass(frozen=True)
class Question:
    """A request that can be repeated: what is computed for it is always the same."""

    kind: str
    route: str
    body: dict[str, Any]
    answer: str  # of a suite that nobody disturbed


def read_answer(route: str, answer: dict[str, Any]) -> str:
    """The text, or the label, of an answer."""
    if route == CLASSIFY:
        return str(answer["data"][0]["label"])
    choice = answer["choices"][0]
    return str(choice["text"] if route == COMPLETIONS else choice["message"]["content"])


def questions(client: httpx.Client) -> list[Question]:
    """Questions of every kind with their answers, one after the other."""
    found = []
    for kind, route, body in _bodies():
        response = client.post(route, json=body | _told(route))
        response.raise_for_status()
        if _margin(route, answer := response.json()) >= MIN_MARGIN:
            found.append(Question(kind, route, body, read_answer(route, answer)))
    return found


def _bodies() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for number in range(16):
        prompt = f"The {number}th man went to the town of London and"
        yield "completion", COMPLETIONS, _greedy(24, prompt=prompt, ignore_eos=True)
    for topic in ("whales", "the sea", "a king", "winter", "money", "horses", "a letter", "bread"):
        messages = [{"role": "user", "content": f"Continue this text. I have heard that {topic}"}]
        yield "chat", CHAT, _greedy(24, messages=messages)
    rows = _rows()
    for row in rows:
        yield "classification", CLASSIFY, {"input": row["text"], "labels": row["labels"]}
    story = _read(TEXT)
    for start in range(0, 24_000, 4_000):
        yield "long prompt", COMPLETIONS, _greedy(8, prompt=story[start : start + 4_000])
    for ending in ("Holmes said", "The door", "I asked him", "She was", "At last", "In the night"):
        yield "shared prefix", COMPLETIONS, _greedy(12, prompt=f"{story[:2_000]}\n\n{ending}")


def _greedy(max_tokens: int, **body: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": max_tokens, **body}


def _rows() -> list[dict[str, Any]]:
    with gzip.open(CLINC_DOMAIN, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in random.Random(0).sample(list(file), 24)]


def _read(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def _told(route: str) -> dict[str, Any]:
    """The fields that make an answer tell how sure it is."""
    if route == CLASSIFY:
        return {}
    return {"logprobs": 2} if route == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}


def _margin(route: str, answer: dict[str, Any]) -> float:
    """Return the least lead of a likeliest token, or label, over the next one."""
    if route == CLASSIFY:
        tops = [[label["logprob"] for label in answer["data"][0]["labels"]]]
    elif route == COMPLETIONS:
        tops = [list(top.values()) for top in answer["choices"][0]["logprobs"]["top_logprobs"]]
    else:
        content = answer["choices"][0]["logprobs"]["content"]
        tops = [[top["logprob"] for top in token["top_logprobs"]] for token in content]
    best = [sorted(top, reverse=True)[:2] for top in tops]
    return min(itertools.starmap(lambda first, second: first - second, best), default=0.0)
