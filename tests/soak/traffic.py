"""Mixed traffic without pause, and the book in which every request ends exactly once."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.soak.questions import BAD, CLASSIFY, Question, read_answer

TIMEOUT_S = 90
PRIORITIES = (-1, 0, 0, 0, 1)
TYPED = {  # what may be answered while a worker is lost, or time is short
    "deadline_exceeded",
    "expert_unavailable",
    "no_attention_worker",
    "not_ready",
    "overloaded",
    "placement_changing",
    "worker_lost",
}


@dataclass
class Book:
    """The ends of the requests."""

    sent: Counter[str] = field(default_factory=Counter)  # by kind
    right: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # typed, by code
    wrong: list[str] = field(
        default_factory=list
    )  # other text, no end, an unknown error, no answer
    times: list[tuple[float, float]] = field(
        default_factory=list
    )  # of each whole answer or stream: when it was asked for, how long it took; in seconds

    @property
    def num_ended(self) -> int:
        """Requests that have an outcome."""
        ended = self.right.total() + self.errors.total()
        return ended + self.cancelled + len(self.wrong)


class Traffic:
    """Some clients that ask one thing after the other until they are told to stop."""

    def __init__(
        self,
        url: str,
        questions: Sequence[Question],
        seed: int,
        *,
        key: str = "",
        priorities: Sequence[int] = PRIORITIES,
    ) -> None:
        """``key`` is the API key they send, if one is needed; whole answers have one of ``priorities``."""
        self.book = Book()
        self._url, self._questions = url, questions
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._rng = random.Random(seed)
        self._priorities = priorities
        self._stopping = asyncio.Event()

    async def run(self, num_clients: int) -> None:
        """Ask until ``stop``; then every request still gets its end."""
        limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)
        async with (
            httpx.AsyncClient(
                base_url=self._url, timeout=TIMEOUT_S, limits=limits, headers=self._headers
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(num_clients):
                group.create_task(self._ask_on(client))

    def stop(self) -> None:
        """Begin nothing new."""
        self._stopping.set()

    async def _ask_on(self, client: httpx.AsyncClient) -> None:
        ways = [self._ask, self._stream, self._cancel, self._hurry, self._ask_badly]
        while not self._stopping.is_set():
            [way] = self._rng.choices(ways, weights=[8, 8, 2, 2, 1])
            question = self._rng.choice(self._questions)
            begun_s = time.monotonic()
            try:
                await way(client, question)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.book.wrong.append(f"{question.kind}: {error!r}")
            if way in (self._ask, self._stream):
                self.book.times.append((begun_s, time.monotonic() - begun_s))

    async def _ask(self, client: httpx.AsyncClient, question: Question) -> None:
        """A whole answer, now and then before or after others."""
        self.book.sent[question.kind] += 1
        body = question.body | {"priority": self._rng.choice(self._priorities)}
        self._note(question, await client.post(question.route, json=body))

    async def _stream(self, client: httpx.AsyncClient, question: Question) -> None:
        if question.route == CLASSIFY:
            return await self._ask(client, question)
        self.book.sent[f"{question.kind}, stream"] += 1
        text, reason, error = "", None, None
        body = question.body | {"stream": True}
        async with client.stream("POST", question.route, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._note(question, response)
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        for line in lines[:-1]:
            chunk = json.loads(line[6:])
            error = error or chunk.get("error")
            for choice in chunk.get("choices", ()):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                reason = choice["finish_reason"] or reason
        if lines[-1] != "data: [DONE]" or (reason is None) == (error is None):
            self.book.wrong.append(f"{question.kind}: a stream without an end: {lines[-3:]}")
        elif error is not None:
            self._note_error(question, error["code"], question.answer.startswith(text))
        else:
            self._note_answer(f"{question.kind}, stream", question, text)
        return None

    async def _cancel(self, client: httpx.AsyncClient, question: Question) -> None:
        """A stream that is closed after a moment."""
        if question.route == CLASSIFY:
            return await self._ask(client, question)
        self.book.sent["cancelled"] += 1
        body = question.body | {"stream": True, "max_tokens": 400, "ignore_eos": True}
        async with client.stream("POST", question.route, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._note(question, response)
            await asyncio.sleep(self._rng.uniform(0, 0.5))
        self.book.cancelled += 1
        return None

    async def _hurry(self, client: httpx.AsyncClient, question: Question) -> None:
        """Less time than it may take."""
        self.book.sent["deadline"] += 1
        headers = {"X-Request-Timeout-Ms": str(self._rng.randint(1, 400))}
        self._note(question, await client.post(question.route, json=question.body, headers=headers))

    async def _ask_badly(self, client: httpx.AsyncClient, _: Question) -> None:
        self.book.sent["bad input"] += 1
        route, body, status = self._rng.choice(BAD)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        response = await client.post(route, content=content, headers=headers)
        if response.status_code == status and response.json()["error"]["code"]:
            self.book.right["bad input"] += 1
        elif response.status_code == 503:  # a worker is missed before the grammar is looked at
            self._note_error(None, response.json()["error"]["code"], True)
        else:
            self.book.wrong.append(f"bad input: {body!r}: {response.status_code} {response.text}")

    def _note(self, question: Question, response: httpx.Response) -> None:
        answer: dict[str, Any] = response.json()
        if response.status_code == 200:
            self._note_answer(question.kind, question, read_answer(question.route, answer))
        else:
            helps = response.status_code != 503 or "retry-after" in response.headers
            self._note_error(question, answer["error"]["code"], helps)

    def _note_answer(self, kind: str, question: Question, text: str) -> None:
        if text == question.answer:
            self.book.right[kind] += 1
        else:
            self.book.wrong.append(f"{kind}: {text!r} instead of {question.answer!r}")

    def _note_error(self, question: Question | None, code: str, in_order: bool) -> None:
        if code in TYPED and in_order:
            self.book.errors[code] += 1
        else:
            kind = question.kind if question else "bad input"
            self.book.wrong.append(f"{kind}: error {code}, in order: {in_order}")
