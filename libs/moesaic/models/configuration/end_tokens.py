"""The tokens that end an answer, as the files of a model name them. Needs no torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.tokenizer_files import (
    CONFIG,
    TokenizerFiles,
    read_special_tokens,
)

log = structlog.get_logger()

_FIELD = "eos_token_id"


def read_end_tokens(
    config: Fields, generation: Fields, directory: Path | None, vocab_size: int
) -> Mapping[int, str]:
    """Unite the end tokens of ``config.json``, of ``generation_config.json`` and of the tokenizer.

    The model cannot write a token beyond the vocabulary, so it is left out with a warning. The family's default is used
    only if no file names a token.

    Returns:
        For each token, the first file that names it.

    Raises:
        CheckpointError: a file is not valid.
    """
    found: dict[int, str] = {}
    for file, token_id in _named(config, generation, directory):
        if token_id < vocab_size:
            found.setdefault(token_id, file)
        else:
            log.warning(
                "end_token.beyond_vocabulary", file=file, token_id=token_id, vocab_size=vocab_size
            )
    default = () if found else config.sizes(_FIELD)
    return found or {token_id: "config.json" for token_id in default if token_id < vocab_size}


def _named(config: Fields, generation: Fields, directory: Path | None) -> Iterator[tuple[str, int]]:
    for file, fields in (("generation_config.json", generation), ("config.json", config)):
        if fields.gives(_FIELD):
            yield from ((file, token_id) for token_id in fields.sizes(_FIELD))
    if directory is None:
        return
    # The default token of a tokenizer's class need not be one of this model.
    text = read_special_tokens(directory, of_class=False).get("eos_token")
    if text and (files := TokenizerFiles.read(directory)).base:
        yield CONFIG, files.ids()[text]
