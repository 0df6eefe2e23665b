"""What requests ask of their logits before a token is picked: biases, penalties, no early end, a
grammar, some tokens only, no bad words.

Batched: a step costs a few operations on the tokens that are concerned, and nothing when no request
asks. What was said before is counted once and kept from step to step.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moesaic.engine.requests import Generation
from moesaic.engine.sequences import Answer


class LogitState:
    """One answer's side of it. ``ids`` are the tokens of prompt and answer, each once, and
    ``counts`` says how often the answer has them."""

    def __init__(self, work: Generation, device: torch.device) -> None:
        bias = work.sampling.logit_bias
        self.bias_ids = torch.tensor([token for token, _ in bias], dtype=torch.int64, device=device)
        self.bias = torch.tensor([value for _, value in bias], device=device)
        allowed = work.sampling.allowed_token_ids
        self.allowed_ids = torch.tensor(allowed, dtype=torch.int64, device=device)
        self.end_ids = torch.tensor(sorted(work.stop_token_ids), dtype=torch.int64, device=device)
        self.matcher = work.grammar.matcher() if work.grammar is not None else None
        self.ids, self.counts = array("q"), array("f")
        self._place: dict[int, int] = {}
        self._num_counted = 0

    def count(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Take notice of the tokens that came since the last call; the first ``num_prompt`` are the
        prompt's."""
        for position in range(self._num_counted, len(tokens)):
            token = tokens[position]
            place = self._place.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0.0)
            self.counts[place] += position >= num_prompt
        self._num_counted = len(tokens)


def process(logits: Tensor, answers: Sequence[Answer]) -> Tensor:
    """Change the logits as each row's request asks.

    Biases come first, then the repetition penalty, which is a factor, then the other two, which are
    subtracted; then end tokens are masked until ``min_tokens``, what is not among the allowed
    tokens, what does not fit the grammar, and what would complete a bad word, as long as anything
    is left.

    Args:
        logits: float32 ``[R, V]``; not changed.
        answers: whose rows these are.

    Returns:
        float32 ``[R, V]``; ``logits`` itself if no row asks for anything.
    """
    asking = [(row, answer) for row, answer in enumerate(answers) if _asks(answer)]
    if not asking:
        return logits
    logits = logits.clone()
    states = [(row, answer, _state(answer, logits)) for row, answer in asking]
    _add_biases(logits, [(row, state) for row, answer, state in states])
    _penalise(logits, [entry for entry in states if entry[1].work.sampling.penalises])
    for row, answer, state in states:
        if answer.num_generated < answer.work.min_tokens:
            logits[row, state.end_ids] = -torch.inf
        if len(state.allowed_ids):
            kept = logits[row, state.allowed_ids]
            logits[row] = -torch.inf
            logits[row, state.allowed_ids] = kept
    _mask(logits, states)
    for row, answer, _ in states:
        if answer.work.sampling.bad_words:
            _avoid(logits[row], answer)
    return logits


def _asks(answer: Answer) -> bool:
    how = answer.work.sampling
    return (
        bool(how.logit_bias or how.allowed_token_ids or how.bad_words)
        or how.penalises
        or answer.num_generated < answer.work.min_tokens
        or answer.work.grammar is not None
    )


def _state(answer: Answer, logits: Tensor) -> LogitState:
    if answer.logit_state is None:
        answer.logit_state = LogitState(answer.work, logits.device)
    return answer.logit_state


def _add_biases(logits: Tensor, rows: Sequence[tuple[int, LogitState]]) -> None:
    rows = [(row, state) for row, state in rows if len(state.bias)]
    if rows:
        at = torch.cat([torch.full_like(state.bias_ids, row) for row, state in rows])
        ids = torch.cat([state.bias_ids for _, state in rows])
        logits.index_put_((at, ids), torch.cat([state.bias for _, state in rows]), accumulate=True)


def _penalise(logits: Tensor, rows: Sequence[tuple[int, Answer, LogitState]]) -> None:
    if not rows:
        return
    for _, answer, state in rows:
        num_prompt = len(answer.request.token_ids) - answer.work.num_resumed
        state.count(answer.tokens, num_prompt)
    lengths = [len(state.ids) for _, _, state in rows]
    hows = [answer.work.sampling for _, answer, _ in rows]

    def spread(values: Sequence[float], dtype: type) -> Tensor:
        """A value of each row, once for each of its tokens."""
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


def _avoid(row: Tensor, answer: Answer) -> None:
    """Mask the last tokens of those bad words whose others the answer ends with."""
    said = answer.answer
    last = [
        word[-1]
        for word in answer.work.sampling.bad_words
        if len(word) == 1 or said[1 - len(word) :] == list(word[:-1])
    ]
    if last:
        without = row.index_fill(0, torch.tensor(last, device=row.device), -torch.inf)
        if not bool(without.isneginf().all()):
            row.copy_(without)


def _mask(logits: Tensor, rows: Sequence[tuple[int, Answer, LogitState]]) -> None:
    at, masks = [], []
    for row, answer, state in rows:
        if state.matcher is not None:
            state.matcher.follow(answer.answer)
            at.append(row)
            masks.append(np.frombuffer(state.matcher.mask(), dtype=np.uint8))
    if masks:
        bits = np.unpackbits(np.stack(masks), axis=1, bitorder="little")[:, : logits.shape[-1]]
        allowed = torch.from_numpy(bits).to(logits.device, torch.bool)
        logits[at] = logits[at].where(allowed, -torch.inf)
