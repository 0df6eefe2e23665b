"""What one engine may take on, and which requests can never run within that."""

from dataclasses import dataclass

from moesaic.classification.candidates import MAX_ANSWER_TOKENS
from moesaic.engine.blocks import BLOCK_SIZE, blocks_for
from moesaic.engine.requests import Generation, Request, Scoring
from moesaic.engine.sweep_rows import blocks_to_sweep
from moesaic.errors import InvalidInput


@dataclass(frozen=True)
class Limits:
    """What one engine may take on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_model_len: int  # tokens of prompt and answer together
    sweep_blocks: int = 0  # room for scoring that stores no KV; 0: there is none
    store_scoring_kv: bool = True  # unless a request says otherwise

    def sweeps(self, work: Generation | Scoring) -> bool:
        """Whether ``work`` stores no KV."""
        if isinstance(work, Generation):
            return False
        return not (self.store_scoring_kv if work.store_kv is None else work.store_kv)


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
        if limits.sweeps(request.work):
            _check_sweep(prompt, extra, request.work, limits)
            return
        most_blocks = blocks_for(prompt)
        if extra > 1:  # behind the prompt's full blocks, one candidate at a time at worst
            most_blocks += blocks_for(prompt + extra - 1) - prompt // BLOCK_SIZE
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


def _check_sweep(prompt: int, extra: int, scoring: Scoring, limits: Limits) -> None:
    if prompt + extra > limits.max_model_len:
        raise InvalidInput(
            "prompt",
            f"prompt ({prompt} tokens) and answer ({extra}) together exceed the "
            f"{limits.max_model_len} tokens there is room for",
            code="context_length_exceeded",
        )
    if (needed := blocks_to_sweep(prompt, scoring)) > limits.sweep_blocks:
        raise InvalidInput(
            "prompt",
            f"prompt ({prompt} tokens) and candidates need room for {needed * BLOCK_SIZE} tokens without "
            f"stored KV, of which there is {limits.sweep_blocks * BLOCK_SIZE}: shorten it, raise the "
            "worker's --sweep-bytes or send moesaic.store_kv true",
            code="context_length_exceeded",
        )


def _longest_candidate(scoring: Scoring, limits: Limits) -> int:
    if not scoring.candidates or not all(scoring.candidates):
        raise InvalidInput("labels", "every candidate must have at least one token")
    longest = max(map(len, scoring.candidates))
    if longest > (most := min(MAX_ANSWER_TOKENS, limits.max_num_batched_tokens)):
        raise InvalidInput("labels", f"a candidate may have at most {most} tokens, got {longest}")
    return longest
