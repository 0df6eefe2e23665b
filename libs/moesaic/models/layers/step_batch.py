"""The rows of one forward pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.brownout import PromisedRows


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

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Copy token ids and positions to ``device``, int64 ``[T]`` each."""
        token_ids, positions = torch.tensor([self.token_ids, self.positions]).to(device)
        return token_ids, positions
