"""What one engine may take on, and which requests can never run within that."""

from dataclasses import dataclass

from moesaic.engine.blocks import BLOCK_SIZE, blocks_for
from moesaic.engine.requests import Request, Scoring
from moesaic.errors import InvalidInput

MAX_CANDIDATE_TOKENS = 256


@dataclass(frozen=True)
class Limits:
    """What one engine may take on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_model_len: int  # tokens of prompt and answer together


def check_request(request: Request, limits: Limits, num_blocks: int) -> None:
    """Refuse what can never run with ``num_blocks`` KV blocks.

    Raises:
        InvalidInput: with the field to correct.
    """
    if not request.token_ids:
        raise InvalidInput("prompt", "must have at least one token")
    prompt = len(request.token_ids)
    if isinstance(request.work, Scoring):
        extra = _longest_candidate(request.work, limits)
        most_blocks = blocks_for(prompt) + blocks_for(prompt + extra)
    else:
        extra = request.work.max_tokens
        least = 1 if request.work.prompt_logprobs is None else 0  # the prompt alone is of interest
        if extra < least:
            raise InvalidInput("max_tokens", f"must be at least {least}, got {extra}")
        most_blocks = blocks_for(prompt + extra)
    if prompt + extra > limits.max_model_len or most_blocks > num_blocks:
        most = min(limits.max_model_len, num_blocks * BLOCK_SIZE)
        raise InvalidInput(
            "prompt",
            f"prompt ({prompt} tokens) and answer ({extra}) together exceed the {most} tokens "
            "there is room for",
            code="context_length_exceeded",
        )


def _longest_candidate(scoring: Scoring, limits: Limits) -> int:
    if not scoring.candidates or not all(scoring.candidates):
        raise InvalidInput("labels", "every candidate must have at least one token")
    longest = max(map(len, scoring.candidates))
    if longest > (most := min(MAX_CANDIDATE_TOKENS, limits.max_num_batched_tokens)):
        raise InvalidInput("labels", f"a candidate may have at most {most} tokens, got {longest}")
    return longest
