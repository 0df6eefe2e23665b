"""Work given straight to an attention worker, past the gateway."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from moesaic.cluster.channels import channel
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
        """Seconds until the greedy next token and the end of the request are here.

        Raises:
            RuntimeError: the worker fails, or ends the stream.
        """
        sampling = pb.Sampling(temperature=0)
        submit = pb.Submit(
            request_id=f"bench-{next(self._ids)}",
            attempt=1,
            token_ids=prompt,
            deadline_ms=DEADLINE_MS,
            generation=pb.Generation(max_tokens=1, sampling=sampling),
        )
        started = time.perf_counter()
        self._commands.put_nowait(pb.ExecuteRequest(submit=submit))
        async for message in self._call:
            for response in message.together or (message,):
                kind = response.WhichOneof("event")
                if kind == "finished":
                    return time.perf_counter() - started
                if kind == "failure":
                    raise RuntimeError(response.failure.message)
        raise RuntimeError("the worker ended the stream")

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()

    async def _sent(self) -> AsyncIterator[pb.ExecuteRequest]:
        while True:
            yield await self._commands.get()


@asynccontextmanager
async def execute_stream(address: str) -> AsyncIterator[ExecuteStream]:
    """Open one to the attention worker at ``address``."""
    async with channel(address) as connection:
        stream = ExecuteStream(AttentionServiceStub(connection))
        yield stream
        stream.close()
