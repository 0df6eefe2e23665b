"""Time of tensors from one process to another over UCXX: there and back, without a frame around them."""

import asyncio
import multiprocessing
import os
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)  # bytes
WARM_UP = 5
TIMEOUT_S = 30.0  # a start takes 15; what hangs costs a lent device so much


def measure_transfers(device: str, repeats: int) -> tuple[dict[str, Any], list[str]]:
    """Measure figures by size, with notes; none where UCXX is not installed or the processes cannot meet."""
    if find_spec("ucxx") is None:
        return {}, ["transfers: not measured, the package ucxx is not installed"]
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_echo, args=(there, device, repeats), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(TIMEOUT_S):
            raise TimeoutError("the other process did not listen")
        times = asyncio.run(_there_and_back(here.recv(), device, repeats))
    except (OSError, EOFError, TimeoutError, RuntimeError) as error:
        return {}, [f"transfers: not measured, {error or type(error).__name__}"]
    finally:
        here.close()
        process.join(5)
        process.kill()
    figures = {
        f"{size >> 10}_kb": {
            "round_trip_us": round(1e6 * taken, 1),
            "gb_per_s_each_way": round(2 * size / taken / 1e9, 2),
        }
        for size, taken in times.items()
    }
    tls = os.environ.get("UCX_TLS", "UCX's choice")
    return figures, [f"transfers: {device} tensors between two processes, transports: {tls}"]


async def _there_and_back(port: int, device: str, repeats: int) -> dict[int, float]:
    """Median seconds of a round trip, by size in bytes."""
    import ucxx

    # Its other modes wait, for milliseconds at times.
    ucxx.init(progress_mode="polling")
    endpoint = await asyncio.wait_for(ucxx.create_endpoint("127.0.0.1", port), TIMEOUT_S)
    times: dict[int, float] = {}
    for size in SIZES:
        sent = torch.randint(-128, 128, (size,), dtype=torch.int8, device=device)
        back = torch.zeros_like(sent)
        taken = []
        for _ in range(WARM_UP + repeats):
            _settle(device)
            started = time.perf_counter()
            await asyncio.wait_for(endpoint.send(_buffer(sent)), TIMEOUT_S)
            await asyncio.wait_for(endpoint.recv(_buffer(back)), TIMEOUT_S)
            _settle(device)
            taken.append(time.perf_counter() - started)
        if not torch.equal(sent, back):
            raise RuntimeError(f"{size} bytes came back changed")
        times[size] = median(taken[WARM_UP:])
    await endpoint.close()
    return times


def _echo(pipe: Connection, device: str, repeats: int) -> None:
    """Send back every message, in the order and number of ``_there_and_back``."""
    import ucxx

    async def serve() -> None:
        ucxx.init(progress_mode="polling")
        done = asyncio.Event()

        async def answer(endpoint: Any) -> None:
            for size in SIZES:
                held = torch.zeros(size, dtype=torch.int8, device=device)
                for _ in range(WARM_UP + repeats):
                    await endpoint.recv(_buffer(held))
                    await endpoint.send(_buffer(held))
            done.set()

        listener = ucxx.create_listener(answer)
        pipe.send(listener.port)
        await asyncio.wait_for(done.wait(), TIMEOUT_S * len(SIZES))

    asyncio.run(serve())


def _buffer(tensor: torch.Tensor) -> Any:
    """Make a buffer for UCXX: a CUDA tensor as it is, another as a numpy array."""
    return tensor if tensor.is_cuda else tensor.numpy()


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
