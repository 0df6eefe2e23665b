"""Prompts of an arrival trace: their times and lengths are recorded, their tokens drawn."""

import math
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from moesaic.cli.load.datasets.prompt import LoadPrompt
from moesaic.cli.load.datasets.trace_rows import TraceColumns, TraceRow, trace_rows
from moesaic.cli.load.options.prompts import PromptOptions
from moesaic.errors import InvalidInput


def timed_prompts(options: PromptOptions, path: Path, pool: Sequence[int]) -> list[LoadPrompt]:
    """Read the first ``num_prompts`` arrivals of a trace; the first one is due at 0.

    Args:
        options: those that begin with ``timed_trace``, and ``seed``.
        path: of the trace.
        pool: ids of tokens to draw from.

    Raises:
        InvalidInput: the file is no such trace.
    """
    known = TraceColumns()
    columns = TraceColumns(
        _first(options.timed_trace_label_timestamp, known.time),
        _first(options.timed_trace_label_input_length, known.prompt_tokens),
        _first(options.timed_trace_label_output_length, known.answer_tokens),
        options.timed_trace_label_hash_ids or known.parts,
    )
    rows = sorted(islice(trace_rows(path, columns), options.num_prompts), key=lambda row: row.time)
    if not rows:
        raise InvalidInput("trace", f"must have requests, {path.name} has none")
    rng = random.Random(options.seed)
    return [_prompt(options, row, row.time - rows[0].time, pool, rng) for row in rows]


def _first(given: str, known: tuple[str, ...]) -> tuple[str, ...]:
    return (given,) if given else known


def _prompt(
    options: PromptOptions, row: TraceRow, after: float, pool: Sequence[int], rng: random.Random
) -> LoadPrompt:
    prompt_tokens, answer_tokens = max(1, row.prompt_tokens), max(1, row.answer_tokens)
    if most := options.timed_trace_max_len:
        answer_tokens = min(answer_tokens, most - 1)
        prompt_tokens = min(prompt_tokens, most - answer_tokens)
    size = options.timed_trace_chunk_hash_size
    content: list[int] = []
    for name in row.parts[: math.ceil(prompt_tokens / size)]:
        # The same name and seed give the same tokens, in whichever request.
        content += random.Random(f"{options.seed} {name}").choices(pool, k=size)
    content = content[:prompt_tokens]
    content += rng.choices(pool, k=prompt_tokens - len(content))
    due_s = after * options.timed_trace_sec_multiplier
    if not math.isfinite(due_s):
        raise InvalidInput("timestamp", f"is too far from that of the first row: {row.time:g}")
    return LoadPrompt(content, prompt_tokens, answer_tokens, due_s)
