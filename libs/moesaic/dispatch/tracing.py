"""Records what gates choose, step by step, beside whatever dispatcher serves.

The gates run once more for it, here, so a trace looks the same in every topology, whoever gates the
rows that are served. Nobody's text or hidden state leaves the engine: ids only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.models.decoder import MoELayer
from moesaic.models.gate import Gate


@dataclass(frozen=True)
class ChosenExperts:
    """What one step chose in all layers."""

    decode_rows: int  # rows of sequences that had one row in the step
    topk_ids: Tensor  # int32 [L, T, k], on the host


class StepTracer:
    """Watches the steps of one engine; lives on its thread."""

    def __init__(self, gates: dict[int, Gate], tell: Callable[[ChosenExperts], None]) -> None:
        """``gates`` by decoder layer, all there are; ``tell`` is called after each step's last."""
        self._gates, self._tell = gates, tell

    def watching(self, sequence_rows: Sequence[int], moe: MoELayer) -> MoELayer:
        """``moe``, noting what is chosen on the way. A step that fails, or that computes some layers
        only, is never told."""
        chosen: dict[int, Tensor] = {}
        decode_rows = sum(rows == 1 for rows in sequence_rows)

        async def note(layer: int, hidden_states: Tensor) -> Tensor:
            chosen[layer] = self._gates[layer](hidden_states)[1].cpu()
            combined = await moe(layer, hidden_states)
            if len(chosen) == len(self._gates) and layer == max(self._gates):
                ids = torch.stack([chosen[at] for at in sorted(chosen)])
                self._tell(ChosenExperts(decode_rows, ids))
            return combined

        return note
