"""Prompts of tokens that are drawn."""

import math
import random
from collections.abc import Sequence

from moesaic.cli.load.datasets.prompt import LoadPrompt
from moesaic.cli.load.options.prompts import PromptOptions


def random_prompts(options: PromptOptions, pool: Sequence[int]) -> list[LoadPrompt]:
    """Draw prompts; each prompt and each answer has its own length.

    Args:
        options: ``num_prompts``, ``seed``, and those that begin with ``random``.
        pool: ids of tokens to draw from.
    """
    rng = random.Random(options.seed)
    prefix = rng.choices(pool, k=options.random_prefix_len)
    of_prompts, of_answers = options.range_ratios

    def length(mean: int, ratio: float) -> int:
        low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
        return rng.randint(max(1, low), max(1, high))

    made = []
    for _ in range(options.num_prompts):
        prompt_tokens = length(options.random_input_len, of_prompts)
        answer_tokens = length(options.output_len or options.random_output_len, of_answers)
        content = prefix + rng.choices(pool, k=prompt_tokens)
        made.append(LoadPrompt(content, len(content), answer_tokens))
    return made


def repeated_prefixes(options: PromptOptions, pool: Sequence[int]) -> list[LoadPrompt]:
    """Draw prefixes, and as many prompts with each, in a drawn order.

    Args:
        options: ``num_prompts``, ``seed``, and those that begin with ``prefix_repetition``.
        pool: ids of tokens to draw from.
    """
    rng = random.Random(options.seed)
    answer_tokens = options.output_len or options.prefix_repetition_output_len
    made = []
    for _ in range(options.prefix_repetition_num_prefixes):
        prefix = rng.choices(pool, k=options.prefix_repetition_prefix_len)
        for _ in range(options.num_prompts // options.prefix_repetition_num_prefixes):
            content = prefix + rng.choices(pool, k=options.prefix_repetition_suffix_len)
            made.append(LoadPrompt(content, len(content), answer_tokens))
    if not options.disable_shuffle:
        rng.shuffle(made)
    return made
