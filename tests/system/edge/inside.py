"""Users of an agent where it is: asks it over gRPC from within its network, as a gateway of its own would.

Arguments: the agent's address and prompts as JSON lists of token ids. Reads the cluster's secret from the
environment. Asks for each prompt in turn until its input ends, and writes one JSON list for each answer: the
number of the prompt and the tokens, or the number and the code of an error.
"""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterable, AsyncIterator, Sequence

from moesaic.cluster.rpc.channels import channel
from moesaic.cluster.security.credentials import Credentials
from moesaic.v1 import attention_pb2 as pb
from moesaic.v1.attention_pb2_grpc import AttentionServiceStub

DEADLINE_MS = 30_000


async def main(address: str, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Ask until the input ends."""
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    credentials = Credentials(os.environ["MOESAIC_SECRET"].encode())
    commands: asyncio.Queue[pb.ExecuteRequest] = asyncio.Queue()

    async def sent() -> AsyncIterator[pb.ExecuteRequest]:
        while True:
            yield await commands.get()

    async with channel(address, credentials=credentials) as connection:
        call = AttentionServiceStub(connection).Execute(sent())
        for number in itertools.cycle(range(len(prompts))):
            if ended.done():
                return
            generation = pb.Generation(
                max_tokens=num_tokens, sampling=pb.Sampling(temperature=0), ignore_eos=True
            )
            submit = pb.Submit(
                request_id=f"inside-{os.urandom(8).hex()}",
                attempt=1,
                token_ids=prompts[number],
                deadline_ms=DEADLINE_MS,
                generation=generation,
                cache_salt=os.urandom(8).hex(),
            )
            commands.put_nowait(pb.ExecuteRequest(submit=submit))
            print(json.dumps([number, await answer(call)]), flush=True)


async def answer(call: AsyncIterable[pb.ExecuteResponse]) -> list[int] | str:
    """Read one answer: its tokens, or the code of an error."""
    tokens: list[int] = []
    async for message in call:
        for response in message.together or (message,):
            kind = response.WhichOneof("event")
            if kind == "tokens":
                tokens += response.tokens.token_ids
            elif kind == "failure":
                return response.failure.code
            elif kind == "finished":
                return tokens
    return "stream_ended"


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])))
