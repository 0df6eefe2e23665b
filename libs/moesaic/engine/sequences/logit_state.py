"""State that the processors of one sequence's logits keep from step to step."""

from array import array
from collections.abc import Sequence

import torch

from moesaic.engine.sequences.requests import GenerationTask


class LogitState:
    """The state of one sequence.

    Attributes:
        ids: tokens of prompt and answer, each once.
        counts: how often the answer has each of them.
    """

    def __init__(self, task: GenerationTask, device: torch.device) -> None:
        bias = task.sampling.logit_bias
        self.bias_ids = torch.tensor([token for token, _ in bias], dtype=torch.int64, device=device)
        self.bias = torch.tensor([value for _, value in bias], device=device)
        allowed = task.sampling.allowed_token_ids
        self.allowed_ids = torch.tensor(allowed, dtype=torch.int64, device=device)
        self.end_ids = torch.tensor(sorted(task.stop_token_ids), dtype=torch.int64, device=device)
        self.matcher = task.grammar.matcher() if task.grammar is not None else None
        self.ids, self.counts = array("q"), array("f")
        self._place: dict[int, int] = {}
        self._num_counted = 0

    def count(self, tokens: Sequence[int], num_prompt: int) -> None:
        """Count the tokens that came since the last call; the first ``num_prompt`` are the prompt's."""
        for position in range(self._num_counted, len(tokens)):
            token = tokens[position]
            place = self._place.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0.0)
            self.counts[place] += position >= num_prompt
        self._num_counted = len(tokens)
