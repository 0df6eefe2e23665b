"""The load of all benchmarks and of ``moesaic bench serve``.

An open loop sends requests when they are due, without waiting for earlier ones. All times of a request count from when
it was due, not from when it was sent: a client or a server that is behind makes no request look quicker. Answers are
kept as they come and read after the measurement. A closed loop, which measures capacities, sends by the same means.
"""

import asyncio
import json
import math
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from moesaic.addresses import host_port
from moesaic.cli.load.connection import HOST, Connection, encoded, request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWER_S = 300.0  # longest wait for a client
_MOST_OF_ERROR = 500  # characters that are kept of an error
Body = Callable[[int], dict[str, Any]]  # by the number of the request
Headers = Callable[[int], Mapping[str, str]]


@dataclass
class TimedRequest:
    """One request and its answer; times are seconds from the start of the load.

    Attributes:
        number: number of the request, which determines its body.
        due_s: it arrived; latencies count from here.
        sent_s: time of sending, later than due if the client was late.
        status: HTTP status, 500 if an error ended a stream; 0 if the connection failed.
        parts: parts of the answer as they arrived, with their times, until they are read.
        end_s: end of the answer.
        token_times: time of each token, if the body asks for token ids.
        token_ids: tokens of the answer, likewise.
        cached_tokens: cached tokens of the prompt, if the answer reports its usage.
        mean_threshold: mean threshold that the answer reports; 1 is exact.
        degraded_share: likewise, of choices.
        complete: the answer has its end, and no error.
        right: the answer is the one meant, where the benchmark judges it.
        text: of the answer and its reasoning, put together.
        text_times: time of each event with text or tokens.
        answered_s: time of the last event of a choice.
        usage: tokens, if the answer reports them.
        error: why there is no whole answer, if that is known.
    """

    number: int
    due_s: float
    sent_s: float = 0.0
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    end_s: float = 0.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    mean_threshold: float = 1.0
    degraded_share: float = 0.0
    complete: bool = False
    right: bool = False
    text: str = ""
    text_times: list[float] = field(default_factory=list)
    answered_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def was_shed(self) -> bool:
        """Refused, to be tried again later."""
        return self.status in (429, 503)

    @property
    def latency_s(self) -> float:
        """Seconds to the end; endless if there is no whole answer."""
        return self.end_s - self.due_s if self.complete else float("inf")

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, or to the end of an empty answer; endless if there is no whole answer."""
        if not self.complete:
            return float("inf")
        return (self.token_times or [self.end_s])[0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Seconds before each later token."""
        return [after - before for before, after in pairwise(self.token_times)]

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a later token; none if there is no later one, endless if there is no answer."""
        if not self.complete:
            return float("inf")
        later = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / later if later > 0 else 0.0

    def read(self) -> None:
        """Read the answer, streamed or not, from its parts; an odd one counts as failed."""
        try:
            self._read_parts()
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            self.complete, self.error = False, f"the answer cannot be read: {error}"
        if self.status not in (0, 200) and not self.error:
            text = b"".join(part for _, part in self.parts).decode(errors="replace")
            self.error = f"status {self.status}: {text[:_MOST_OF_ERROR]}"
        if not self.complete and not self.error:
            self.error = "the answer broke off"
        self.parts = []

    def _read_parts(self) -> None:
        if b"".join(part for _, part in self.parts[:2]).lstrip().startswith(b"{"):
            if self.status == 200:
                self.complete, self.answered_s = True, self.end_s
                self._take(json.loads(b"".join(part for _, part in self.parts)), self.end_s)
            return
        rest, is_ended = b"", False
        for at, part in self.parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                name, _, data = line.strip().partition(b":")
                if name == b"data" and data.strip() == b"[DONE]":
                    is_ended = True
                elif name == b"data":
                    is_ended |= self._take(json.loads(data), at)
        self.complete = is_ended and self.status == 200

    def _take(self, event: dict[str, Any], at: float) -> bool:
        """Take one event; return whether a choice ends, as some servers do not send ``[DONE]``."""
        if event.get("error"):
            self.complete, self.status = False, 500
            self.error = str(event["error"])[:_MOST_OF_ERROR]
            return False
        is_ended = False
        # Some servers send events of their own, such as pings.
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids") or []
            self.token_ids += ids
            self.token_times += [at] * len(ids)
            said = choice.get("delta") or choice.get("message") or choice
            text = "".join(said.get(name) or "" for name in ("reasoning", "content", "text"))
            self.text += text
            self.text_times += [at] if text or ids else []
            self.answered_s = at
            is_ended |= bool(choice.get("finish_reason"))
        self.usage = event.get("usage") or self.usage
        details = self.usage.get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens") or self.cached_tokens
        quality = (event.get("moesaic") or {}).get("quality") or {}
        self.mean_threshold = quality.get("mean_threshold", self.mean_threshold)
        self.degraded_share = quality.get("degraded_share", self.degraded_share)
        return is_ended


class LoadClient:
    """Sends requests to a server, on as many kept connections as there are requests in flight."""

    def __init__(
        self,
        port: int,
        route: str,
        *,
        host: str = HOST,
        tls: ssl.SSLContext | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Make a client of a server.

        Args:
            port: of the server.
            route: of all requests.
            host: of the server, by default this machine.
            tls: for a server of https.
            answer_s: longest wait for an answer, in seconds.
        """
        self._port, self._route, self._host = port, route, host
        self._tls, self._answer_s = tls, answer_s
        self._idle: list[Connection] = []
        self._started = time.perf_counter()

    @property
    def now_s(self) -> float:
        """Seconds since the start of the load."""
        return time.perf_counter() - self._started

    async def open(self, connections: int) -> None:
        """Open connections beforehand, which would else cost time of requests."""
        self._idle += [await self._dialled() for _ in range(connections)]

    async def open_loop(
        self,
        due: Sequence[float],
        body: Body,
        headers: Headers = lambda _: {},
        start_s: float = 0.0,
        most: int | None = None,
    ) -> list[TimedRequest]:
        """Send requests when they are due, and wait for all answers.

        Args:
            due: seconds, in order.
            body: returns the body of each request.
            headers: likewise.
            start_s: the time that it is now.
            most: requests in flight; further ones that are due wait unsent. None: any number.

        Returns:
            The requests with their answers, read.
        """
        requests = [TimedRequest(number, at) for number, at in enumerate(due)]
        sent = [self._bytes(body(n), headers(n)) for n in range(len(requests))]
        turns = asyncio.Semaphore(most or max(1, len(requests)))

        async def in_turn(each: TimedRequest, content: bytes) -> None:
            async with turns:
                await self._ask(each, content)

        self._started = time.perf_counter() - start_s
        async with asyncio.TaskGroup() as tasks:
            for each, content in zip(requests, sent, strict=True):
                if (wait_s := each.due_s - self.now_s) > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(in_turn(each, content))
        return _read(requests)

    async def closed_loop(
        self, clients: int, body: Body, *, seconds: float = math.inf, count: int | None = None
    ) -> list[TimedRequest]:
        """Have clients ask one request after the other, each due when its client is free.

        Args:
            clients: clients that ask at the same time.
            body: returns the body of each request.
            seconds: after which none begins another.
            count: number of requests, which are made beforehand; None: as many as fit into the time.

        Returns:
            The requests with their answers, read.
        """
        made = [self._bytes(body(number), {}) for number in range(count or 0)]
        most = math.inf if count is None else count
        requests: list[TimedRequest] = []
        self._started = time.perf_counter()

        async def one_client() -> None:
            while self.now_s < seconds and (number := len(requests)) < most:
                requests.append(each := TimedRequest(number, self.now_s))
                await self._ask(each, made[number] if made else self._bytes(body(number), {}))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(clients):
                tasks.create_task(one_client())
        return _read(requests)

    def close(self) -> None:
        """Hang up."""
        for connection in self._idle:
            connection.close()
        self._idle = []

    def _bytes(self, body: dict[str, Any], headers: Mapping[str, str]) -> bytes:
        host = {} if self._host == HOST else {"Host": host_port(self._host, self._port)}
        return request(self._route, encoded(body), {**host, **headers})

    async def _ask(self, each: TimedRequest, content: bytes) -> None:
        """Send one request, and keep the parts of its answer."""
        each.sent_s = self.now_s
        connection = None
        try:
            async with asyncio.timeout(self._answer_s):
                connection = await self._connection()
                each.status = await connection.ask(content)
                while part := await connection.part():
                    each.parts.append((self.now_s, part))
            self._idle.append(connection)
        except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError) as error:
            # The last two: this is no HTTP.
            each.status, each.error = 0, f"{type(error).__name__}: {error}"
            if connection is not None:
                connection.close()
        each.end_s = self.now_s

    async def _connection(self) -> Connection:
        """Take a connection that rests, or open one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_over:
                return connection
            connection.close()
        return await self._dialled()

    async def _dialled(self) -> Connection:
        return await Connection.open(self._port, self._host, self._tls)


def _read(requests: list[TimedRequest]) -> list[TimedRequest]:
    """Read all answers, once that no longer costs time that is measured."""
    for each in requests:
        each.read()
    return requests
