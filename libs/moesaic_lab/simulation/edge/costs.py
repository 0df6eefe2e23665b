"""Costs of edge servers: what a layer takes on one GPU, and a message between two servers."""

from dataclasses import dataclass
from typing import Self

from moesaic.errors import InvalidInput
from moesaic.messages.performance import PerformanceModel

WANTED = "attention", "experts", "link.inter"


@dataclass(frozen=True, kw_only=True)
class EdgeCosts:
    """Seconds of the parts of one layer.

    Attributes:
        layer_s: of a pass, without experts; the head and layers without experts are shared out evenly.
        row_s: of each row of it.
        key_s: of each key that a row sees.
        experts_s: of one batch of experts on one GPU.
        expert_s: of each expert of it.
        choice_s: of each choice: a row counts once for every expert that it goes to.
        hop_s: of a message on its way, without what its bytes take.
        message_s: of a message on its sender's link, beside its bytes.
        row_bytes: of a row in a message, either way.
    """

    layer_s: float
    row_s: float
    key_s: float
    experts_s: float
    expert_s: float
    choice_s: float
    hop_s: float
    message_s: float
    row_bytes: float

    @classmethod
    def of(cls, model: PerformanceModel, num_layers: int, row_bytes: float) -> Self:
        """Share a model's passes out over layers.

        Args:
            model: its ``link.inter`` has the hop and the message; a link's bytes are the fleet's.
            num_layers: with experts.
            row_bytes: of a row in a message.

        Raises:
            InvalidInput: a part is missing.
        """
        if missing := [part for part in WANTED if part not in model.parts]:
            raise InvalidInput("costs", f"must have the parts {', '.join(missing)}")
        step_s, row_s, key_s = model.parts["attention"].unit_s
        head_s, head_row_s = model.parts["head"].unit_s if "head" in model.parts else (0.0, 0.0)
        experts_s, expert_s, choice_s = model.parts["experts"].unit_s
        hop_s, message_s, _ = model.parts["link.inter"].unit_s
        return cls(
            layer_s=(step_s + head_s + head_row_s) / num_layers,
            row_s=row_s / num_layers,
            key_s=key_s / num_layers,
            experts_s=experts_s,
            expert_s=expert_s,
            choice_s=choice_s,
            hop_s=hop_s,
            message_s=message_s,
            row_bytes=row_bytes,
        )
