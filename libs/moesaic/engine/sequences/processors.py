"""Changes of logits before a token is picked: biases, penalties, masks.

Masked are end tokens that come too early, tokens that are not allowed, that do not fit the grammar, or that would
complete a bad word.

Batched: a step costs a few operations on the tokens concerned, and nothing if no request asks for
any. Tokens are counted once, and the counts are kept from step to step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.sequences.logit_state import LogitState
from moesaic.engine.sequences.sequence import GenerationSequence


def process(logits: Tensor, generations: Sequence[GenerationSequence]) -> Tensor:
    """Change the logits as each row's request asks.

    1. Biases are added.
    2. The repetition penalty, a factor, is applied; then the other two penalties are subtracted.
    3. Masked are: end tokens until ``min_tokens``, tokens that are not among the allowed ones, tokens
       that do not fit the grammar, and those that would complete a bad word, if any other is left.

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
        sequence.logit_state = LogitState(sequence.task, logits.device)
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
