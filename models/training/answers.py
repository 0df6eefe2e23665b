"""Exact answers to the generation sets' questions, by the serving engine itself on the exported checkpoint."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from models.training import corpus
from moesaic.classification.candidates import Candidates
from moesaic.dispatch.local import LocalDispatcher
from moesaic.engine.engine import Engine
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    Request,
    RequestKey,
    ScoreEvent,
    ScoringTask,
    TokenEvent,
)
from moesaic.engine.steps.admission import EngineLimits
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.decoder import Decoder
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.gateway.language import Language

LIMITS = EngineLimits(
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    max_num_queued_reqs=1 << 20,
    max_num_queued_tokens=1 << 30,
    max_model_len=2048,
)
NUM_BLOCKS = 4096


@dataclass(frozen=True)
class Asked:
    """A prompt, with the candidates to compare behind it, or the most tokens to answer it with."""

    prompt: tuple[int, ...]
    candidates: Candidates = ()
    max_tokens: int = 0


@dataclass(frozen=True)
class Exactness:
    """Count of one set's questions whose greedy answer equals the reference."""

    name: str
    rows: int
    exact: float


Answer = list[int] | tuple[float, ...]  # generated token ids, or the candidates' log-probabilities


def answer_all(directory: Path, asked: Sequence[Asked]) -> list[Answer]:
    """Answer prompts greedily, or compare their candidates, batched as the engine sees fit."""
    return asyncio.run(_answer(directory, asked))


def generate(directory: Path, prompts: Sequence[str], max_tokens: int) -> list[str]:
    """Generate greedy answers to user turns."""
    language = Language(directory)
    asked = [Asked(tuple(language.dialogue.ask(p)), max_tokens=max_tokens) for p in prompts]
    return [
        language.tokenizer.decode([int(token) for token in tokens])
        for tokens in answer_all(directory, asked)
    ]


async def _answer(directory: Path, asked: Sequence[Asked]) -> list[Answer]:
    config, checkpoint, cpu = load_config(directory), Checkpoint(directory), torch.device("cpu")
    decoder = Decoder.load(checkpoint, config, torch.float32, cpu)
    dispatcher = LocalDispatcher(checkpoint, config, torch.float32, cpu)
    answers: list[Answer] = [[] for _ in asked]
    done, left = asyncio.Event(), len(asked)

    def emit(events: list[Event]) -> None:
        nonlocal left
        for event in events:
            if isinstance(event, FailureEvent):
                raise event.error
            if isinstance(event, TokenEvent):
                tokens = answers[int(event.key.request_id)]
                assert isinstance(tokens, list)
                tokens.append(event.token_id)
            if isinstance(event, ScoreEvent):
                answers[int(event.key.request_id)] = event.logprobs
            left -= isinstance(event, FinishEvent)
        if left == 0:
            done.set()

    engine = Engine(decoder, dispatcher, LIMITS, NUM_BLOCKS, emit, recovery_s=0)
    stops = frozenset(config.eos_token_ids)
    for number, one in enumerate(asked):
        task = (
            ScoringTask(one.candidates)
            if one.candidates
            else GenerationTask(max_tokens=one.max_tokens, stop_token_ids=stops)
        )
        engine.submit(Request(RequestKey(str(number)), one.prompt, task))
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
    answers = generate(directory, [corpus.asked(name, str(r["prompt"])) for r in rows], max_tokens)
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
