"""Prompts of files: recorded conversations, and lines of JSON."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moesaic.cli.load.datasets.prompt import LoadPrompt
from moesaic.cli.load.datasets.trace_rows import MOST_TOKENS
from moesaic.cli.load.options.prompts import PromptOptions
from moesaic.cli.terminal.outcome import CommandError, Exit, using

# Of conversations: shorter and longer ones are left out, as vLLM does.
LEAST, MOST_OF_PROMPT, MOST = 4, 1024, 2048
# What a file that is not as it should be raises; integers and depths of JSON can be beyond Python's.
WRONG = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)
Tokens = Callable[[str], int]


def file_prompts(options: PromptOptions, path: Path, tokens: Tokens) -> list[LoadPrompt]:
    """Read prompts from a file, in a drawn order; too few are used again.

    Args:
        options: of them and their answers.
        path: of a file. ``sharegpt``: a JSON list of conversations, of which the first two turns count. ``custom``: a
            line of JSON with ``prompt`` for each, and ``output_tokens`` if it likes.
        tokens: counts those of a text.

    Raises:
        CommandError: the file cannot be read, or has no prompts.
    """
    with using(f"--dataset-path {path}"):
        text = path.read_text(encoding="utf-8", errors="replace")
    is_custom = options.dataset_name == "custom"
    rows = _custom(path, text) if is_custom else _sharegpt(path, text)
    if not options.disable_shuffle:
        random.Random(options.seed).shuffle(rows)
    made = _of_custom(options, path, rows) if is_custom else _of_sharegpt(options, rows, tokens)
    found = [prompt for prompt, _ in zip(made, range(options.num_prompts), strict=False)]
    if not found:
        raise CommandError(f"--dataset-path {path}: has no prompts", Exit.USAGE)
    if options.no_oversample:
        return found
    return [found[number % len(found)] for number in range(options.num_prompts)]


def _sharegpt(path: Path, text: str) -> list[tuple[str, Any]]:
    try:
        turns = [each.get("conversations") or each.get("conversation") for each in json.loads(text)]
        both = [each[:2] for each in turns if each and len(each) >= 2]
        return [(str(first["value"]), str(second["value"])) for first, second in both]
    except WRONG as error:
        why = 'must be a JSON list of {"conversations": [{"value": ...}, {"value": ...}]}'
        raise CommandError(f"--dataset-path {path}: {why}", Exit.USAGE) from error


def _of_sharegpt(
    options: PromptOptions, rows: list[tuple[str, Any]], tokens: Tokens
) -> Iterator[LoadPrompt]:
    fixed = options.output_len or options.sharegpt_output_len
    for prompt, answer in rows:
        prompt_tokens, answer_tokens = tokens(prompt), fixed or tokens(answer)
        fits = LEAST <= prompt_tokens <= MOST_OF_PROMPT and prompt_tokens + answer_tokens <= MOST
        if fits and (fixed or answer_tokens >= LEAST):
            yield LoadPrompt(prompt, prompt_tokens, answer_tokens)


def _custom(path: Path, text: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            told = row.get("output_tokens")
            if told is not None and not int(told) <= MOST_TOKENS:
                raise ValueError("no answer has so many tokens")
            found.append((str(row["prompt"]), None if told is None else int(told)))
        except WRONG as error:
            why = 'must be an object such as {"prompt": "...", "output_tokens": 128}'
            raise CommandError(f"--dataset-path {path}:{number}: {why}", Exit.USAGE) from error
    return found


def _of_custom(
    options: PromptOptions, path: Path, rows: list[tuple[str, Any]]
) -> Iterator[LoadPrompt]:
    fixed = options.output_len or options.custom_output_len
    for prompt, told in rows:
        if fixed < 0 and told is None:
            why = "each line must have output_tokens with --custom-output-len -1"
            raise CommandError(f"--dataset-path {path}: {why}", Exit.USAGE)
        yield LoadPrompt(prompt, 0, max(1, told if fixed < 0 else fixed))
