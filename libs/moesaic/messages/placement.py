"""The placement: the expert in every slot of every worker."""

import msgspec

from moesaic.messages.rung import Rung

EMPTY_SLOT = -1


class PlacedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """An expert worker as the placement knows it."""

    worker_id: str
    generation: int
    admin_address: str
    data_address: str
    weights_address: str = ""  # where its experts can be fetched; empty: nowhere
    ridge_rows: int = 0  # rows of an expert that take as long as its weights; 0: not known
    node: str = ""  # what it shares memory or a fast bus with; empty: a node of its own

    @property
    def node_name(self) -> str:
        """The node; a worker that shares none has one of its own."""
        return self.node or f"{self.worker_id}'s own"


class Placement(msgspec.Struct, frozen=True, kw_only=True, tag="placement.v1"):
    """The placement document: per layer and worker, the expert in each slot. Its epoch only grows.

    ``slots[i][n][s]`` is the expert in slot ``s`` of worker ``n`` for decoder layer ``layers[i]``;
    -1 is an empty slot.
    """

    epoch: int
    model_digest: str
    num_experts: int  # of a layer: the model's own, and behind them the united ones of ``rung``
    workers: list[PlacedWorker]
    layers: list[int]
    slots: list[list[list[int]]]
    rung: Rung = Rung()  # how choices may be degraded
    num_united: int = 0  # the last of ``num_experts``

    @property
    def num_own(self) -> int:
        """Experts of a layer that the model itself has."""
        return self.num_experts - self.num_united

    def holders(self, layer: int) -> list[list[int]]:
        """Indices of the workers that hold each expert of a decoder layer, ascending."""
        held: list[list[int]] = [[] for _ in range(self.num_experts)]
        for worker_idx, experts in enumerate(self.slots[self.layers.index(layer)]):
            for expert_id in experts:
                if expert_id != EMPTY_SLOT and worker_idx not in held[expert_id]:
                    held[expert_id].append(worker_idx)
        return held


class PlacementHint(msgspec.Struct, frozen=True, kw_only=True, tag="placement-hint.v1"):
    """A placement was committed; read the document."""

    epoch: int
