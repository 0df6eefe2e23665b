"""Exact answers to the generation sets' questions, by the serving engine itself on the exported checkpoint."""

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from models.training import corpus
from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.engine import Engine
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    Request,
    RequestKey,
    TokenEvent,
)
from moesaic.engine.steps.limits import EngineLimits
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint

LIMITS = EngineLimits(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_num_queued_reqs=1 << 20,
    max_num_queued_tokens=1 << 30,
    max_model_len=2048,
)
NUM_BLOCKS = 4096


@dataclass(frozen=True)
class Exactness:
    """Count of one set's questions whose greedy answer equals the reference."""

    name: str
    rows: int
    exact: float


def answer_all(directory: Path, prompts: list[str], max_tokens: int) -> list[str]:
    """Generate greedy answers to user turns, batched as the engine sees fit."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    asked = [f"{corpus.USER_HEAD}{prompt}{corpus.ASSISTANT_HEAD}" for prompt in prompts]
    ids = [e.ids for e in tokenizer.encode_batch(asked, add_special_tokens=False)]
    return [
        tokenizer.decode(tokens) for tokens in asyncio.run(_generate(directory, ids, max_tokens))
    ]


async def _generate(directory: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    config, checkpoint, cpu = load_config(directory), Checkpoint(directory), torch.device("cpu")
    decoder = Decoder.load(checkpoint, config, torch.float32, cpu)
    dispatcher = LocalDispatcher(checkpoint, config, torch.float32, cpu)
    answers: list[list[int]] = [[] for _ in prompts]
    done, left = asyncio.Event(), len(prompts)

    def emit(events: list[Event]) -> None:
        nonlocal left
        for event in events:
            if isinstance(event, FailureEvent):
                raise event.error
            if isinstance(event, TokenEvent):
                answers[int(event.key.request_id)].append(event.token_id)
            left -= isinstance(event, FinishEvent)
        if left == 0:
            done.set()

    engine = Engine(decoder, dispatcher, LIMITS, NUM_BLOCKS, emit, recovery_s=0)
    task = GenerationTask(max_tokens=max_tokens, stop_token_ids=frozenset(config.eos_token_ids))
    for number, tokens in enumerate(prompts):
        engine.submit(Request(RequestKey(str(number)), tuple(tokens), task))
    running = asyncio.create_task(engine.run())
    finished = asyncio.create_task(done.wait())
    await asyncio.wait((running, finished), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return answers


def exactness(directory: Path, name: str, most_rows: int) -> Exactness:
    """Ask a test split's questions as the training data asked them."""
    rows = corpus.read_rows(name, "test")
    rows = rows[:: max(1, len(rows) // most_rows)] if most_rows else rows
    max_tokens = 200 if name == "gsm8k" else 16
    answers = answer_all(
        directory, [corpus.asked(name, str(r["prompt"])) for r in rows], max_tokens
    )
    right = sum(
        _final(name, answer) == str(row["reference"]).strip()
        for answer, row in zip(answers, rows, strict=True)
    )
    return Exactness(name, len(rows), right / len(rows))


def _final(name: str, answer: str) -> str:
    """Extract the part of an answer that is compared: the last number of a worked solution."""
    if name != "gsm8k":
        return answer.strip()
    numbers = re.findall(r"-?[\d,]*\.?\d+", answer)
    return numbers[-1].replace(",", "") if numbers else ""
