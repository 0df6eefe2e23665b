"""Sampling: from logits to tokens, and to the log-probabilities that callers ask for.

1. ``process`` changes the logits: biases, penalties, masks. Masked are end tokens that come too early,
   tokens that are not allowed, that do not fit the grammar, or that would complete a bad word. It is
   batched: a step costs a few operations on the tokens concerned, and nothing if no request asks for any.
   Tokens are counted once, and the counts are kept from step to step.
2. ``sample`` picks. Randomness is counter-based: the draw for token ``n`` of a request is a function of
   its seed and ``n``. So a request that goes on elsewhere gets the same tokens as if it had stayed. For
   the same reason no row's token depends on the rows beside it.
3. ``describe`` gives log-probabilities: the model's own, before penalties, biases and masks.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.sequences.requests import PromptEvent, Sampling, TokenLogprob
from moesaic.engine.sequences.sequence import Chunk, GenerationSequence, LogitState
from moesaic.kernels.sampling import PickRules, pick_tokens

AT_ONCE_BYTES = 1 << 22  # a prompt's rows are many, and each costs a copy of its logits for a while


def process(logits: Tensor, generations: Sequence[GenerationSequence]) -> Tensor:
    """Change the logits as each row's request asks.

    1. Biases are added.
    2. The repetition penalty, a factor, is applied; then the other two penalties are subtracted.
    3. Tokens are masked: end tokens until ``min_tokens``, and tokens that are not allowed or do not fit the grammar.
    4. Tokens that would complete a bad word are masked, if any other token is left.

    Args:
        logits: float32 ``[R, V]``; not changed.
        generations: the sequence of each row.

    Returns:
        float32 ``[R, V]``; ``logits`` itself if no row asks for anything.
    """
    asking = [(row, sequence) for row, sequence in enumerate(generations) if _asks(sequence)]
    if not asking:
        return logits
    logits = logits.clone()
    states = [(row, sequence, _state(sequence, logits)) for row, sequence in asking]
    _add_biases(logits, [(row, state) for row, sequence, state in states])
    _penalise(logits, [entry for entry in states if entry[1].task.sampling.penalises])
    for row, sequence, state in states:
        if sequence.num_generated < sequence.task.min_tokens:
            logits[row, state.end_ids] = -torch.inf
        if len(state.allowed_ids):
            kept = logits[row, state.allowed_ids]
            logits[row] = -torch.inf
            logits[row, state.allowed_ids] = kept
    _mask(logits, states)
    for row, sequence, _ in states:
        if sequence.task.sampling.bad_words:
            _avoid(logits[row], sequence)
    return logits


def _asks(sequence: GenerationSequence) -> bool:
    how = sequence.task.sampling
    return (
        bool(how.logit_bias or how.allowed_token_ids or how.bad_words)
        or how.penalises
        or sequence.num_generated < sequence.task.min_tokens
        or sequence.task.grammar is not None
    )


def _state(sequence: GenerationSequence, logits: Tensor) -> LogitState:
    if sequence.logit_state is None:
        task, how = sequence.task, sequence.task.sampling

        def ids(tokens: Iterable[int]) -> Tensor:
            return torch.tensor([*tokens], dtype=torch.int64, device=logits.device)

        sequence.logit_state = LogitState(
            bias_ids=ids(token for token, _ in how.logit_bias),
            bias=torch.tensor([value for _, value in how.logit_bias], device=logits.device),
            allowed_ids=ids(how.allowed_token_ids),
            end_ids=ids(sorted(task.stop_token_ids)),
            matcher=task.grammar.matcher() if task.grammar is not None else None,
        )
    return sequence.logit_state


def _add_biases(logits: Tensor, rows: Sequence[tuple[int, LogitState]]) -> None:
    rows = [(row, state) for row, state in rows if len(state.bias)]
    if rows:
        at = torch.cat([torch.full_like(state.bias_ids, row) for row, state in rows])
        ids = torch.cat([state.bias_ids for _, state in rows])
        logits.index_put_((at, ids), torch.cat([state.bias for _, state in rows]), accumulate=True)


def _penalise(logits: Tensor, rows: Sequence[tuple[int, GenerationSequence, LogitState]]) -> None:
    if not rows:
        return
    for _, sequence, state in rows:
        num_prompt = len(sequence.request.token_ids) - sequence.task.num_resumed
        state.count(sequence.tokens, num_prompt)
    lengths = [len(state.ids) for _, _, state in rows]
    hows = [sequence.task.sampling for _, sequence, _ in rows]

    def spread(values: Sequence[float], dtype: type) -> Tensor:
        """Repeat the value of each row, once for each of its tokens."""
        return torch.from_numpy(np.repeat(np.array(values, dtype), lengths)).to(logits.device)

    at = spread([row for row, _, _ in rows], np.int64)
    ids = torch.from_numpy(np.concatenate([state.ids for _, _, state in rows])).to(logits.device)
    counts = np.concatenate([state.counts for _, _, state in rows])
    said = torch.from_numpy(counts).to(logits.device)
    repetition = spread([how.repetition_penalty for how in hows], np.float32)
    presence = spread([how.presence_penalty for how in hows], np.float32)
    frequency = spread([how.frequency_penalty for how in hows], np.float32)
    found = logits[at, ids]
    found = torch.where(found > 0, found / repetition, found * repetition)
    logits[at, ids] = found - frequency * said - presence * (said > 0)


def _avoid(row: Tensor, sequence: GenerationSequence) -> None:
    """Mask the last token of each bad word that the answer lacks only that token of."""
    said = sequence.answer_tokens
    last = [
        word[-1]
        for word in sequence.task.sampling.bad_words
        if len(word) == 1 or said[1 - len(word) :] == list(word[:-1])
    ]
    if last:
        without = row.index_fill(0, torch.tensor(last, device=row.device), -torch.inf)
        if not bool(without.isneginf().all()):
            row.copy_(without)


def _mask(logits: Tensor, rows: Sequence[tuple[int, GenerationSequence, LogitState]]) -> None:
    at, masks = [], []
    for row, sequence, state in rows:
        if state.matcher is not None:
            state.matcher.follow(sequence.answer_tokens)
            at.append(row)
            masks.append(np.frombuffer(state.matcher.mask(), dtype=np.uint8))
    if masks:
        bits = np.unpackbits(np.stack(masks), axis=1, bitorder="little")[:, : logits.shape[-1]]
        allowed = torch.from_numpy(bits).to(logits.device, torch.bool)
        logits[at] = logits[at].where(allowed, -torch.inf)


def draw(seed: int, position: int) -> float:
    """Return the uniform number in [0, 1) that belongs to ``position`` under ``seed``."""
    bits = np.random.Philox(key=seed & (2**64 - 1), counter=position)
    return float(np.random.Generator(bits).random())


def sample(logits: Tensor, rows: Sequence[tuple[Sampling, int]]) -> list[int]:
    """Pick one token a row, of those that ``process`` has left.

    Args:
        logits: float32 ``[R, V]``; minus infinity is never picked.
        rows: the rules of each, and the token's position in its sequence, prompt included.
    """
    return pick_tokens(logits, [_rules(how, position) for how, position in rows])


def _rules(how: Sampling, position: int) -> PickRules:
    if how.temperature <= 0:
        return PickRules()
    return PickRules(how.temperature, how.top_k, how.top_p, how.min_p, draw(how.seed, position))


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
