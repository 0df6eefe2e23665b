"""Limits of one engine, and the requests that can never run within them."""

from dataclasses import dataclass

from moesaic.classification.candidates import MAX_ANSWER_TOKENS
from moesaic.engine.sequences.blocks import blocks_for
from moesaic.engine.sequences.requests import GenerationTask, Request, ScoringTask
from moesaic.engine.steps.sweep_rows import blocks_to_sweep
from moesaic.errors import InvalidInput
from moesaic.prefix.block_hashes import BLOCK_SIZE


@dataclass(frozen=True)
class EngineLimits:
    """Bounds on the requests that one engine takes on."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    max_model_len: int  # tokens of prompt and answer together
    sweep_blocks: int = 0  # room for scoring that stores no KV; 0: there is none
    store_scoring_kv: bool = True  # unless a request says otherwise

    def sweeps(self, task: GenerationTask | ScoringTask) -> bool:
        """True if ``task`` stores no KV."""
        if isinstance(task, GenerationTask):
            return False
        return not (self.store_scoring_kv if task.store_kv is None else task.store_kv)


def check_request(request: Request, limits: EngineLimits, num_blocks: int) -> None:
    """Refuse a request that can never run with ``num_blocks`` KV blocks.

    Raises:
        InvalidInput: with the field to correct.
    """
    if not request.token_ids:
        raise InvalidInput("prompt", "must have at least one token")
    prompt = len(request.token_ids)
    if isinstance(request.task, ScoringTask):
        extra = _longest_candidate(request.task, limits)
        if limits.sweeps(request.task):
            _check_sweep(prompt, extra, request.task, limits)
            return
        most_blocks = blocks_for(prompt)
        if extra > 1:  # behind the prompt's full blocks, one candidate at a time at worst
            most_blocks += blocks_for(prompt + extra - 1) - prompt // BLOCK_SIZE
    else:
        extra = request.task.max_tokens
        least = 1 if request.task.prompt_logprobs is None else 0  # the prompt alone is of interest
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


def _check_sweep(prompt: int, extra: int, scoring: ScoringTask, limits: EngineLimits) -> None:
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


def _longest_candidate(scoring: ScoringTask, limits: EngineLimits) -> int:
    if not scoring.candidates or not all(scoring.candidates):
        raise InvalidInput("labels", "every candidate must have at least one token")
    longest = max(map(len, scoring.candidates))
    if longest > (most := min(MAX_ANSWER_TOKENS, limits.max_num_batched_tokens)):
        raise InvalidInput("labels", f"a candidate may have at most {most} tokens, got {longest}")
    return longest
