"""Work given straight to an attention worker, past the gateway."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from moesaic.cluster.rpc.channels import channel
from moesaic.v1 import attention_pb2 as pb
from moesaic.v1.attention_pb2_grpc import AttentionServiceStub

if TYPE_CHECKING:
    from moesaic.v1.attention_pb2_grpc import AttentionServiceAsyncStub  # a name for type checkers

DEADLINE_MS = 60_000


class ExecuteStream:
    """An ``Execute`` stream of our own beside the gateway's."""

    def __init__(self, stub: "AttentionServiceAsyncStub") -> None:
        self._commands: asyncio.Queue[pb.ExecuteRequest] = asyncio.Queue()
        self._call = stub.Execute(self._sent())
        self._ids = itertools.count()

    async def one_token(self, prompt: Sequence[int]) -> float:
        """Measure the seconds until the greedy next token and the end of the request are here.

        Raises:
            RuntimeError: the worker fails, or ends the stream.
        """
        started = time.perf_counter()
        async for _ in self._events(prompt, generation=_greedy(1)):
            pass
        return time.perf_counter() - started

    async def token_times(
        self, prompt: Sequence[int], num_tokens: int, begun: asyncio.Event
    ) -> list[float]:
        """Generate this number of greedy tokens, and set ``begun`` at the first; raises as ``one_token``.

        Returns:
            The time at which each came, on ``time.perf_counter``.
        """
        times = []
        generation = _greedy(num_tokens, ignore_eos=True)
        async for response in self._events(prompt, generation=generation):
            if response.WhichOneof("event") == "tokens":
                times.append(time.perf_counter())
                begun.set()
        return times

    async def score(
        self, prompt: Sequence[int], candidates: Sequence[int], store_kv: bool
    ) -> tuple[float, list[float]]:
        """Score these next tokens; raises as ``one_token``.

        Returns:
            Seconds until their log-probabilities were here, and these.
        """
        started, logprobs = time.perf_counter(), []
        asked = [pb.Candidate(token_ids=[token]) for token in candidates]
        scoring = pb.Scoring(candidates=asked, store_kv=store_kv)
        async for response in self._events(prompt, scoring=scoring):
            if response.WhichOneof("event") == "scores":
                logprobs = list(response.scores.logprobs)
        return time.perf_counter() - started, logprobs

    async def _events(
        self, prompt: Sequence[int], **work: pb.Generation | pb.Scoring
    ) -> AsyncIterator[pb.ExecuteResponse]:
        submit = pb.Submit(
            request_id=f"bench-{next(self._ids)}",
            attempt=1,
            token_ids=prompt,
            deadline_ms=DEADLINE_MS,
            **work,  # type: ignore[arg-type]  # one of the message's oneof
        )
        self._commands.put_nowait(pb.ExecuteRequest(submit=submit))
        async for message in self._call:
            for response in message.together or (message,):
                kind = response.WhichOneof("event")
                if kind == "failure":
                    raise RuntimeError(response.failure.message)
                yield response
                if kind == "finished":
                    return
        raise RuntimeError("the worker ended the stream")

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()

    async def _sent(self) -> AsyncIterator[pb.ExecuteRequest]:
        while True:
            yield await self._commands.get()


def _greedy(max_tokens: int, *, ignore_eos: bool = False) -> pb.Generation:
    sampling = pb.Sampling(temperature=0)
    return pb.Generation(max_tokens=max_tokens, sampling=sampling, ignore_eos=ignore_eos)


@asynccontextmanager
async def execute_stream(address: str) -> AsyncIterator[ExecuteStream]:
    """Open a stream to the attention worker at ``address``."""
    async with channel(address) as connection:
        stream = ExecuteStream(AttentionServiceStub(connection))
        yield stream
        stream.close()
