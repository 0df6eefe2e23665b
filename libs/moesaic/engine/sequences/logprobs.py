"""Log-probabilities of tokens as callers get them: the model's own, before penalties, biases and masks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moesaic.engine.sequences.requests import PromptEvent, TokenLogprob
from moesaic.engine.sequences.sequence import Chunk, GenerationSequence

AT_ONCE_BYTES = 1 << 22  # a prompt's rows are many, and each costs a copy of its logits for a while


def describe(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Describe each row's token: its log-probability, its rank, and the likeliest in its place.

    Args:
        logits: float32 ``[R, V]``.
        token_ids: the token of each row.
        num_top: how many of the likeliest are wanted of each row, at most ``V``.
    """
    described: list[TokenLogprob] = []
    at_once = max(1, AT_ONCE_BYTES // (logits.element_size() * logits.shape[-1]))
    for start in range(0, len(token_ids), at_once):
        some = slice(start, start + at_once)
        described += _describe(logits[some], token_ids[some], num_top[some])
    return described


def _describe(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    total = logits.logsumexp(dim=-1, keepdim=True)  # [R, 1]
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(1)
    chosen = logits.gather(1, ids)
    ranks = 1 + (logits > chosen).sum(dim=-1)
    values, top_ids = logits.topk(max(num_top), dim=-1)
    return [
        TokenLogprob(logprob, tuple(zip(best[:count], likely[:count], strict=True)), rank)
        for logprob, best, likely, rank, count in zip(
            (chosen - total).squeeze(1).tolist(),
            top_ids.tolist(),
            (values - total).tolist(),
            ranks.tolist(),
            num_top,
            strict=True,
        )
    ]


def describe_prompt(sequence: GenerationSequence, chunk: Chunk, logits: Tensor) -> PromptEvent:
    """Describe the prompt's tokens that follow the rows of ``chunk``.

    A chunk that runs again after a preemption describes only those that are new.
    """
    prompt = sequence.request.token_ids
    first, end = sequence.num_described, min(chunk.start + len(logits) + 1, len(prompt))
    sequence.num_described = max(first, end)
    tokens = prompt[first:end]
    skipped = first - chunk.start - 1
    num_top = [sequence.task.prompt_logprobs or 0] * len(tokens)
    described = describe(logits[skipped : skipped + len(tokens)], tokens, num_top)
    told = sequence.account.degradation
    return PromptEvent(sequence.request.key, first, tuple(described), told)


def describe_picked(
    logits: Tensor, generations: list[GenerationSequence], picked: list[int]
) -> list[TokenLogprob | None]:
    """Describe the tokens just picked, for the sequences that ask for it."""
    told: list[TokenLogprob | None] = [None] * len(generations)
    asked = [i for i, s in enumerate(generations) if s.task.top_logprobs is not None]
    if asked:
        num_top = [generations[i].task.top_logprobs or 0 for i in asked]
        described = describe(logits[asked], [picked[i] for i in asked], num_top)
        for i, logprob in zip(asked, described, strict=True):
            told[i] = logprob
    return told
