"""The real load: requests of known lengths, sent when they are due, and the times of their tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moesaic.cli.load.generator import COMPLETIONS, LoadClient
from moesaic_lab.simulation.arrivals import ArrivalTrace

FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN = 300, 4095  # of the demo model: past special ones and bytes
Lengths = Sequence[tuple[int, int]]  # tokens of a prompt and of its answer


@dataclass
class TimedAnswer:
    """One request; times are seconds from the start of its load.

    Attributes:
        due_s: it is sent then, or a little later if the client is late.
        sent_s: it was sent.
        token_s: time of each token.
    """

    prompt_tokens: int
    answer_tokens: int
    due_s: float
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)

    @property
    def begun_s(self) -> float:
        """Time of the first token."""
        return self.token_s[0]

    @property
    def ended_s(self) -> float:
        """Time of the last token."""
        return self.token_s[-1]

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token, from when the request was due."""
        return self.begun_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Mean seconds of a later token; there must be one."""
        return (self.ended_s - self.begun_s) / (self.answer_tokens - 1)


class SimulateClient:
    """Sends requests of given lengths to a gateway. Each prompt is drawn, so nothing is cached."""

    def __init__(self, port: int, seed: int) -> None:
        self._load, self._random = LoadClient(port, COMPLETIONS), random.Random(seed)

    async def open(self, connections: int) -> None:
        """Open connections beforehand, which would else cost time of requests."""
        await self._load.open(connections)

    async def serve(self, trace: ArrivalTrace) -> list[TimedAnswer]:
        """Send the requests of a trace when they are due, without waiting for earlier ones."""
        columns = trace.prompt_tokens.tolist(), trace.answer_tokens.tolist()
        return await self._served(trace.at_s.tolist(), list(zip(*columns, strict=True)))

    async def one_by_one(self, lengths: Lengths) -> list[TimedAnswer]:
        """Send requests one after the other."""
        return [answer for each in lengths for answer in await self.together([each])]

    async def together(self, lengths: Lengths) -> list[TimedAnswer]:
        """Send requests at once."""
        return await self._served([0.0] * len(lengths), lengths)

    def close(self) -> None:
        """Hang up."""
        self._load.close()

    async def _served(self, due: Sequence[float], lengths: Lengths) -> list[TimedAnswer]:
        """Send requests.

        Raises:
            RuntimeError: an answer has not as many tokens as were asked for, or is an error.
        """
        bodies = [self._body(*each) for each in lengths]
        found = []
        for request in await self._load.open_loop(due, bodies.__getitem__):
            asked, times = lengths[request.number], request.token_times
            if len(times) != asked[1]:
                raise RuntimeError(f"asked for {asked[1]} tokens, got {len(times)}: {request}")
            found.append(TimedAnswer(*asked, request.due_s, request.sent_s, times))
        return found

    def _body(self, prompt_tokens: int, answer_tokens: int) -> dict[str, Any]:
        plain = range(FIRST_PLAIN_TOKEN, LAST_PLAIN_TOKEN)
        return {
            "prompt": self._random.choices(plain, k=prompt_tokens),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
