"""The prompts that options ask for."""

from dataclasses import replace
from itertools import islice
from typing import Any

from moesaic.cli.load.datasets.drawn import random_prompts, repeated_prefixes
from moesaic.cli.load.datasets.files import file_prompts
from moesaic.cli.load.datasets.prompt import LoadPrompt
from moesaic.cli.load.datasets.timed import timed_prompts
from moesaic.cli.load.datasets.vocabulary import WORDS, Vocabulary
from moesaic.cli.load.options.load import LoadOptions
from moesaic.cli.terminal.console import say
from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.errors import InvalidInput


def prompts_of(options: LoadOptions, vocabulary: Vocabulary) -> list[LoadPrompt]:
    """Draw or read the prompts of a load.

    Args:
        options: of the load.
        vocabulary: of the model; where it is unknown, prompts are of words.

    Raises:
        CommandError: a file is wrong.
    """
    path = options.dataset_path
    if path is not None and options.dataset_name != "timed_trace":
        return file_prompts(
            options, path, lambda text: len(vocabulary.tokens(text) or text.split())
        )
    pool = vocabulary.pool()
    if not pool:
        say(
            "the server does not answer /tokenize: prompts are of words, and it counts their tokens"
        )
    drawn_from = pool or range(len(WORDS))
    if path is not None:
        try:
            made = timed_prompts(options, path, drawn_from)
        except InvalidInput as error:
            raise CommandError(f"--dataset-path {path}: {error}", Exit.USAGE) from error
    elif options.dataset_name == "random":
        made = random_prompts(options, drawn_from)
    else:
        made = repeated_prefixes(options, drawn_from)
    if not pool:
        made = [_written(each, lambda ids: " ".join(WORDS[i] for i in ids)) for each in made]
    elif options.backend == "openai-chat":
        # Chats take texts only.
        made = [_written(each, vocabulary.spelt) for each in made]
    return _batches(made, options.random_batch_size)


def _written(prompt: LoadPrompt, spelt: Any) -> LoadPrompt:
    return replace(prompt, content=spelt(prompt.content))


def _batches(prompts: list[LoadPrompt], size: int) -> list[LoadPrompt]:
    """Put several prompts into one request each."""
    if size == 1:
        return prompts
    left, made = iter(prompts), []
    while some := list(islice(left, size)):
        contents: Any = [each.content for each in some]
        tokens = sum(each.prompt_tokens for each in some)
        made.append(LoadPrompt(contents, tokens, 1, prompts=len(some)))
    return made
