"""Load on a suite: every answer is compared with the undisturbed one, every failure is kept."""

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.waiting import eventually

TOKENS = 24
PROMPTS = [f"The {number}th man went to the town of London and" for number in range(6)]

Row = dict[str, object]


def classify(client: httpx.Client, row: Row) -> str:
    """The label of a row, or ``error: <code>``."""
    body = {"model": "demo", "input": row["text"], "labels": row["labels"]}
    answer = client.post("/v1/classify", json=body).json()
    return _error_of(answer) or str(answer["data"][0]["label"])


def stream(client: httpx.Client, prompt: str) -> str:
    """The text of a greedy stream, or ``error: <code>``; a stream must end with ``[DONE]``."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    text, lines = "", []
    with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return _error_of(json.loads(response.read())) or f"status {response.status_code}"
        for line in response.iter_lines():
            lines += [line] if line else []
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if error := _error_of(chunk):
                return error
            text += "".join(choice["text"] for choice in chunk["choices"])
    return text if lines[-1:] == ["data: [DONE]"] else "cut off"


def _error_of(answer: dict[str, dict[str, object]]) -> str:
    return f"error: {answer['error']['code']}" if "error" in answer else ""


@dataclass
class Answers:
    """Return the answers of an undisturbed suite."""

    rows: list[Row]
    labels: list[str]
    texts: list[str]

    @classmethod
    def of(cls, client: httpx.Client, rows: list[Row]) -> "Answers":
        """Ask for all of them, one after the other."""
        labels = [classify(client, row) for row in rows]
        return cls(rows, labels, [stream(client, prompt) for prompt in PROMPTS])


@dataclass
class Load:
    """Some clients that ask without pause until they are told to stop."""

    client: httpx.Client
    expected: Answers
    num_right: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # typed ones, by code
    wrong: list[str] = field(default_factory=list)  # other text, no end, no answer at all
    longest_s: float = 0.0

    def __enter__(self) -> "Load":
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(4)]
        for thread in self._threads:
            thread.start()
        self.until_right(8)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def until_right(self, count: int) -> None:
        """Wait for ``count`` further right answers."""
        enough = self.num_right + count
        eventually(lambda: self.num_right >= enough)

    def _ask(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                answer, right = self._ask_once(turn)
            except (httpx.HTTPError, ValueError) as error:
                answer, right = f"{type(error).__name__}: {error}", ""
            with self._lock:
                self.longest_s = max(self.longest_s, time.monotonic() - started)
                if answer == right:
                    self.num_right += 1
                elif answer.startswith("error: "):
                    self.errors[answer.removeprefix("error: ")] += 1
                else:
                    self.wrong.append(f"{answer!r} instead of {right!r}")
            turn += 4

    def _ask_once(self, turn: int) -> tuple[str, str]:
        if turn % 2:
            idx = turn // 2 % len(PROMPTS)
            return stream(self.client, PROMPTS[idx]), self.expected.texts[idx]
        idx = turn // 2 % len(self.expected.rows)
        return classify(self.client, self.expected.rows[idx]), self.expected.labels[idx]
