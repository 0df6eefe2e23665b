"""A route of FastAPI under uvicorn that checks a small body and answers with a constant.

It shows the cost of a web framework alone on this machine. As a program it serves the route until it is ended.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from moesaic.cli.load.connection import HOST, Connection

ROUTE = "/constant"
START_S = 30.0
POLL_S = 0.05


class Body(BaseModel):
    """The fields that a completion needs at least."""

    model: str
    prompt: str
    max_tokens: int
    temperature: float


@asynccontextmanager
async def bare_route() -> AsyncIterator[Connection]:
    """Start the route in a process of its own, and connect to it."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.gateway.bare_route", str(port)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        connection = await _connected(port)
        yield connection
        connection.close()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _connected(port: int) -> Connection:
    """Connect, with some patience; raises OSError if the route does not listen by then."""
    for _ in range(int(START_S / POLL_S)):
        with suppress(OSError):
            return await Connection.open(port)
        await asyncio.sleep(POLL_S)
    return await Connection.open(port)


def main() -> None:
    """Serve."""
    app = FastAPI()

    @app.post(ROUTE)
    async def constant(body: Body) -> dict[str, str]:
        return {"text": "yes"}

    uvicorn.run(app, host=HOST, port=int(sys.argv[1]), access_log=False, log_level="warning")


if __name__ == "__main__":
    main()
