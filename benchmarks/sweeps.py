"""The longest prompt that can be scored with and without stored KV in the same memory, and its cost for others.

The benchmark makes a model of random weights with Qwen3-30B-A3B's 48 layers, its ratio of KV to
hidden states, and an eighth of its width. One attention worker, a process of its own, is asked over
gRPC. Its KV cache has as many bytes as its area for sweeps. The longest prompt that either takes is
computed, and one more token refused. A second worker has KV to spare. There a prompt is scored both
ways, alone and beside an answer whose tokens are timed. Prompts that differ only in their end are
swept at once, and compared with prompts that share nothing.
"""

import asyncio
import math
import os
import tempfile
import time
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.execute_stream import ExecuteStream, execute_stream
from benchmarks.common.models import qwen3_moe, write_model
from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.common.turns import spread

SHAPE = qwen3_moe(
    hidden_size=256,
    num_hidden_layers=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    max_position_embeddings=1 << 16,
    tie_word_embeddings=True,
)
BLOCK = 16  # tokens
KV_BYTES = 2 * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4  # of a token in one layer
STORED_BYTES = KV_BYTES * SHAPE["num_hidden_layers"]
SWEPT_BYTES = KV_BYTES + SHAPE["hidden_size"] * 4
WARM_UP_TOKENS = 128
FIRST_PLAIN_TOKEN = 300  # past special tokens and single bytes
CANDIDATES = (400, 500, 600)
ANSWER_TOKENS = 128
SIBLINGS, OWN_TOKENS = 8, 16  # prompts at once, and what each has for itself


def run(quick: bool) -> dict[str, Any]:
    """Measure; ``quick`` has half the memory, and one shorter prompt to compare at."""
    memory, tokens, rounds = (4 << 20, 1024, 1) if quick else (8 << 20, 2048, 2)
    torch.manual_seed(11)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_model(model, SHAPE, "float32", tokenizer=DEMO)
        stored, swept = memory // (STORED_BYTES * BLOCK), memory // (SWEPT_BYTES * BLOCK)
        settings = {
            "MOESAIC_MAX_NUM_BATCHED_TOKENS": "512",
            "MOESAIC_SWEEP_BYTES": str(memory),
        }
        topology = ("--topology", "local", "--model", str(model))
        with running_suite(*topology, **settings, MOESAIC_KV_BLOCKS=str(stored)) as suite:
            longest = asyncio.run(_longest(suite, {"stored": stored, "swept": swept}))
        spare = str(2 * tokens // BLOCK)
        with running_suite(*topology, **settings, MOESAIC_KV_BLOCKS=spare) as suite:
            figures = asyncio.run(_compared(suite, tokens, rounds))
            figures["siblings"] = asyncio.run(_siblings(suite, tokens // 2, rounds))
    ratio = longest["swept"]["tokens"] / longest["stored"]["tokens"]
    return {
        "config": {
            **SHAPE,
            "dtype": "float32",
            "memory_bytes": memory,
            "stored_bytes_per_token": STORED_BYTES,
            "swept_bytes_per_token": SWEPT_BYTES,
            "rows_at_a_time": 512,
            "compared_at_tokens": tokens,
            "rounds": rounds,
            "cores": os.cpu_count(),
        },
        "figures": {"longest": {**longest, "ratio": round(ratio, 2)}, **figures},
        "notes": [
            "longest: computed by the worker, which refused one token more; peak_growth_bytes: of its resident memory, "
            "which has the cache or the area in it already, as far as it was used before",
            "stored: KV of all layers; swept: hidden states, and KV of one layer",
            f"siblings: {SIBLINGS} prompts of {tokens // 2} tokens, of which {OWN_TOKENS} are their own, swept at "
            "once; apart: the same number of prompts that share nothing",
            "gap: between two tokens of an answer, while the prompt, or nothing, is scored beside it",
            *(
                ["quick: less memory, shorter prompts, one round, the same code path"]
                if quick
                else []
            ),
        ],
    }


async def _longest(suite: RunningSuite, num_blocks: dict[str, int]) -> dict[str, Any]:
    """Find, for each way, the longest prompt that a worker with this number of blocks takes."""
    process = Path("/proc") / str(suite.processes["attention-0"]["pid"])
    figures = {}
    async with execute_stream(suite.attention_address) as worker:
        for way, blocks in num_blocks.items():
            store_kv, tokens = way == "stored", blocks * BLOCK
            await worker.score(_prompt(WARM_UP_TOKENS), CANDIDATES, store_kv)
            # Begin its peak anew.
            (process / "clear_refs").write_text("5")
            before = _status_bytes(process, "VmHWM")
            seconds, logprobs = await worker.score(_prompt(tokens), CANDIDATES, store_kv)
            assert len(logprobs) == len(CANDIDATES)
            figures[way] = {
                "tokens": tokens,
                "seconds": round(seconds, 2),
                "peak_growth_bytes": _status_bytes(process, "VmHWM") - before,
            }
            if await _takes(worker, tokens + 1, store_kv):
                raise RuntimeError(f"{way}: {tokens + 1} tokens fit too")
    return figures


async def _takes(worker: ExecuteStream, tokens: int, store_kv: bool) -> bool:
    try:
        await worker.score(_prompt(tokens), CANDIDATES, store_kv)
    except RuntimeError as error:
        if "room for" not in str(error):
            raise
        return False
    return True


async def _compared(suite: RunningSuite, tokens: int, rounds: int) -> dict[str, Any]:
    """Score one prompt both ways, in turns: alone, then beside an answer."""
    seconds: dict[str, list[float]] = {"stored": [], "swept": []}
    gaps: dict[str, list[float]] = {"stored": [], "swept": [], "nothing": []}
    address = suite.attention_address
    async with execute_stream(address) as worker, execute_stream(address) as beside:
        await worker.one_token(_prompt(WARM_UP_TOKENS))
        await worker.score(_prompt(WARM_UP_TOKENS), CANDIDATES, False)
        for _ in range(rounds):
            prompt = _prompt(tokens)
            told = []
            # Swept first: it leaves nothing to be found.
            for way in ("swept", "stored"):
                took, logprobs = await worker.score(prompt, CANDIDATES, way == "stored")
                seconds[way].append(took)
                told.append(logprobs)
            assert told[0] == told[1], "the two ways differ"
            for way in gaps:
                gaps[way] += await _gaps(worker, beside, way, tokens)
    return {
        "alone": {f"{way}_s": spread(values) for way, values in seconds.items()},
        "gap_beside": {
            f"{way}_ms": spread([gap * 1e3 for gap in values]) for way, values in gaps.items()
        },
    }


async def _gaps(worker: ExecuteStream, beside: ExecuteStream, way: str, tokens: int) -> list[float]:
    """Measure the seconds between an answer's tokens while a prompt is scored in this way, or none is."""
    begun = asyncio.Event()
    answer = asyncio.create_task(beside.token_times(_prompt(16), ANSWER_TOKENS, begun))
    await begun.wait()
    until = math.inf
    if way != "nothing":
        await worker.score(_prompt(tokens), CANDIDATES, way == "stored")
        until = time.perf_counter()
    return [later - earlier for earlier, later in pairwise(await answer) if later < until]


async def _siblings(suite: RunningSuite, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure the seconds until several prompts are swept, alike or apart."""
    seconds: dict[str, list[float]] = {"alike": [], "apart": []}
    async with AsyncExitStack() as parts:
        workers = [
            await parts.enter_async_context(execute_stream(suite.attention_address))
            for _ in range(SIBLINGS)
        ]
        for _ in range(rounds):
            for way, taken in seconds.items():
                shared = _prompt(tokens - OWN_TOKENS)
                asked = [[*shared, *_prompt(OWN_TOKENS)] for _ in workers]
                if way == "apart":
                    asked = [[FIRST_PLAIN_TOKEN + i, *p[1:]] for i, p in enumerate(asked)]
                started = time.perf_counter()
                each = zip(workers, asked, strict=True)
                await asyncio.gather(*(w.score(p, CANDIDATES, False) for w, p in each))
                taken.append(time.perf_counter() - started)
    return {f"{way}_s": spread(values) for way, values in seconds.items()}


def _prompt(length: int) -> list[int]:
    return torch.randint(FIRST_PLAIN_TOKEN, SHAPE["vocab_size"], (length,)).tolist()


def _status_bytes(process: Path, field: str) -> int:
    lines = (process / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
