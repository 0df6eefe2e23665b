"""``truncate_prompt_tokens``: a prompt that is too long loses its beginning, as in vLLM."""

from typing import Annotated

from pydantic import AfterValidator, Field

from moesaic.errors import InvalidInput

MEANING = (
    "only that many of the prompt's last tokens are used, special tokens included; -1: as many as "
    "leave room for the answer in the model's context"
)


def _checked(asked: int) -> int:
    if asked == 0:
        raise ValueError("must be -1 or at least 1, since a prompt must not be empty")
    return asked


KeptTokens = Annotated[int, Field(ge=-1, lt=1 << 31), AfterValidator(_checked)]


def kept_tokens(asked: int | None, most: int, answer_tokens: int) -> int | None:
    """Tell how many of a prompt's last tokens to keep; None: all.

    Args:
        asked: the field.
        most: tokens of prompt and answer together.
        answer_tokens: room that -1 leaves for the answer.

    Raises:
        InvalidInput: it asks for more than ``most``.
    """
    if asked is not None and asked > most:
        fix = (
            f"must be at most {most}, the tokens of prompt and answer together, or -1; got {asked}"
        )
        raise InvalidInput("truncate_prompt_tokens", fix)
    return max(1, most - answer_tokens) if asked == -1 else asked
