"""Prompts of a load, drawn or read from files, with the tokens that each answer shall have."""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.cli.terminal.outcome import CommandError, Exit, using

# Words that most vocabularies have as one token each.
WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by"),
    *("on", "not", "he", "his", "but", "at", "are", "this", "have", "from", "or", "had", "an"),
)
CUSTOM_OUTPUT_LEN = 256


@dataclass(frozen=True)
class LoadPrompt:
    """One prompt of a load.

    Attributes:
        content: text, or ids of tokens.
        prompt_tokens: its tokens as far as they are known; the server's count wins.
        answer_tokens: longest answer.
    """

    content: str | list[int]
    prompt_tokens: int
    answer_tokens: int


def random_prompts(
    count: int,
    lengths: tuple[int, int],
    ratio: float,
    pool: Sequence[int],
    seed: int,
) -> list[LoadPrompt]:
    """Draw prompts; each prompt and each answer has its own length.

    Args:
        count: prompts.
        lengths: mean tokens of prompts and of answers.
        ratio: lengths are drawn evenly from ``[(1 - ratio) * length, (1 + ratio) * length]``.
        pool: ids of tokens to draw from; empty: words are drawn instead, and lengths are of words.
        seed: the same one draws the same prompts.
    """
    rng = random.Random(seed)

    def drawn(length: int) -> int:
        low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
        return rng.randint(max(1, low), max(1, high))

    made = []
    for _ in range(count):
        prompt_tokens, answer_tokens = drawn(lengths[0]), drawn(lengths[1])
        content: str | list[int] = (
            rng.choices(pool, k=prompt_tokens)
            if pool
            else " ".join(rng.choices(WORDS, k=prompt_tokens))
        )
        made.append(LoadPrompt(content, prompt_tokens, answer_tokens))
    return made


def file_prompts(
    path: Path,
    kind: str,
    count: int,
    answer_tokens: int | None,
    tokens: Callable[[str], int],
    seed: int,
) -> list[LoadPrompt]:
    """Read prompts from a file, in a drawn order; fewer than ``count`` are used again.

    Args:
        path: of a file.
        kind: ``sharegpt``: a JSON list of conversations, of which the first two turns count. ``custom``: a line of
            JSON with ``prompt`` for each, and ``output_tokens`` if it likes.
        count: prompts.
        answer_tokens: of every answer; None: as the file says.
        tokens: counts those of a text.
        seed: the same one draws the same order.

    Raises:
        CommandError: the file cannot be read, or has no prompts.
    """
    with using(f"--dataset-path {path}"):
        text = path.read_text(encoding="utf-8", errors="replace")
    pairs = _sharegpt(path, text) if kind == "sharegpt" else _custom(path, text)
    if not pairs:
        raise CommandError(f"--dataset-path {path}: has no prompts", Exit.USAGE)
    random.Random(seed).shuffle(pairs)
    found = []
    for number in range(count):
        prompt, answer = pairs[number % len(pairs)]
        length = answer_tokens
        if length is None:
            length = tokens(answer) if isinstance(answer, str) else answer
        found.append(LoadPrompt(prompt, 0, max(1, length)))
    return found


def _sharegpt(path: Path, text: str) -> list[tuple[str, str | int]]:
    try:
        turns = [each.get("conversations") or each.get("conversation") for each in json.loads(text)]
        pairs = [each[:2] for each in turns if each and len(each) >= 2]
        return [(str(first["value"]), str(second["value"])) for first, second in pairs]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        why = 'must be a JSON list of {"conversations": [{"value": ...}, {"value": ...}]}'
        raise CommandError(f"--dataset-path {path}: {why}", Exit.USAGE) from error


def _custom(path: Path, text: str) -> list[tuple[str, str | int]]:
    found: list[tuple[str, str | int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: dict[str, Any] = json.loads(line)
            found.append((str(row["prompt"]), int(row.get("output_tokens", CUSTOM_OUTPUT_LEN))))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            why = 'must be an object such as {"prompt": "...", "output_tokens": 128}'
            raise CommandError(f"--dataset-path {path}:{number}: {why}", Exit.USAGE) from error
    return found


def due_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Draw when requests are due, in seconds; the last one is due at ``count / rate``.

    Args:
        count: requests.
        rate: requests a second; infinite: all are due at once.
        burstiness: shape of the Gamma distribution of gaps; 1: a Poisson process, more: more even.
        seed: the same one draws the same times.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng, due, now = random.Random(seed), list[float](), 0.0
    for _ in range(count):
        now += rng.gammavariate(burstiness, 1 / burstiness) if math.isfinite(burstiness) else 1.0
        due.append(now)
    scale = count / rate / now if now else 0.0
    return [each * scale for each in due]
