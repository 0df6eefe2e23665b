"""Records the choices of gates, step by step, beside any dispatcher.

The gates run once more for it, on the engine's side, so a trace looks the same in every topology.
Only ids leave the engine, no text and no hidden states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.models.layers.decoder import MoELayer
from moesaic.models.layers.gate import Gate


@dataclass(frozen=True)
class ChosenExperts:
    """The experts that one step chose in all layers."""

    decode_rows: int  # rows of sequences that had one row in the step
    topk_ids: Tensor  # int32 [L, T, k], on the host


class StepTracer:
    """Watches the steps of one engine; lives on its thread."""

    def __init__(self, gates: dict[int, Gate], tell: Callable[[ChosenExperts], None]) -> None:
        """``gates`` of all layers with experts; ``tell`` is called after each step's last layer."""
        self._gates, self._tell = gates, tell

    def watching(self, sequence_rows: Sequence[int], moe: MoELayer) -> MoELayer:
        """Wrap ``moe`` to note choices on the way.

        A step that fails, or that computes only some layers, is never reported.
        """
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
