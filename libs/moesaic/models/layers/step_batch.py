"""The rows of one forward pass."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from moesaic.kernels.promised import PromisedRows


@dataclass
class StepBatch:
    """One forward pass over rows of several sequences, flattened.

    The rows of a sequence are consecutive positions, and each attends to position 0 up to its own.
    So a prompt, a chunk of one, the rest of one whose prefix is cached, and a decoded token are all
    the same thing. Sequences may share leading blocks, which a step only reads.
    """

    token_ids: list[int]  # T of them
    positions: list[int]  # T of them, absolute
    sequence_rows: list[int]  # rows of each sequence, in order, at least 1 each; they sum to T
    # KV blocks of each sequence, in order; they cover all positions up to this step's.
    block_tables: list[list[int]]
    wanted: list[int]  # of each sequence, how many of its last rows' next-token logits are wanted
    promised: PromisedRows | None = None  # None: every choice of a row is served by its own expert

    @cached_property
    def attending(self) -> list[int] | None:
        """Indices of the rows that attend in the last layer, ascending; None: all do."""
        if self.wanted == self.sequence_rows:
            return None
        # One row attends at least, for the same bits and counts however a step is computed.
        wanted = self.wanted if any(self.wanted) else [1, *self.wanted[1:]]
        ends = accumulate(self.sequence_rows)
        return [row for end, few in zip(ends, wanted, strict=True) for row in range(end - few, end)]

    @cached_property
    def promised_last(self) -> PromisedRows | None:
        """Promises to those rows; counted with the others when they are settled."""
        if self.promised is None or self.attending is None:
            return self.promised
        return self.promised.only(self.attending)

    def promised_in(self, num_rows: int) -> PromisedRows | None:
        """Promises to the rows of a layer that ``num_rows`` pass: all of them, or those that attend in the last."""
        return self.promised if num_rows == len(self.token_ids) else self.promised_last

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Copy token ids and positions to ``device``, int64 ``[T]`` each."""
        token_ids, positions = torch.tensor([self.token_ids, self.positions]).to(device)
        return token_ids, positions
